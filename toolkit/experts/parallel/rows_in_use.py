"""Rows of expert parameters that are in use. The last rows of dynamic experts are zero, and steps leave them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from toolkit.experts.compat import set_data_of_other_shape
from toolkit.experts.parallel.optimizer_rows import unwrapped
from toolkit.experts.parallel.ownership import is_owned

_ROWS_IN_USE = WeakTensorKeyDictionary()
"""Parameter -> number of rows in use, if not all are."""


def mark_rows_in_use(parameter: Tensor, rows: int | None) -> None:
    """Declare that rows of `parameter` after the first `rows` are zero and get no gradient. None: all are in use.

    Norms, clipping and averages of gradients read the rows in use only, and so do steps under `RowsInUse`. Whoever
    fills another row calls this before the next step.
    """
    if rows is None:
        _ROWS_IN_USE.pop(parameter, None)
    else:
        _ROWS_IN_USE[parameter] = rows


def in_use(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return the rows in use of `tensor`, which is `parameter`, its gradient or its optimizer state."""
    if not _ROWS_IN_USE:  # a look-up takes a microsecond per parameter
        return tensor
    return tensor[: _ROWS_IN_USE.get(parameter)]


SetData = Callable[[Tensor, Tensor], None]


def _set_data(parameter: Tensor, data: Tensor) -> None:
    """Keep the node that accumulates the parameter's gradients: DDP has its hooks there."""
    parameter.data = data


class RowsInUse:
    """Restriction of a training step to the rows in use of `parameters` and their states, from `narrow`, before the
    forward pass, to the end of the step of `optimizer`, or to `widen` without a step.

    Weights, gradients and moments of unused rows are zero, so a step would spend time without changing them. The first
    step, which creates the optimizer states, uses all rows. With `in_ddp`, parameters that are not owned are narrowed
    for the optimizer step only, because DDP averages their gradients in buckets of a fixed size.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizer: Optimizer, *, in_ddp: bool):
        self.parameters, self.in_ddp = list(parameters), in_ddp
        self._optimizer = unwrapped(optimizer)
        self._weights: list[tuple[Tensor, Tensor, SetData]] = []
        self._states: list[tuple[dict[str, Any], str, Tensor]] = []
        """Full state tensors during a step."""
        self._hooks = [
            self._optimizer.register_step_pre_hook(lambda *_: self._narrow(self.parameters, _set_data)),
            self._optimizer.register_step_post_hook(lambda *_: self.widen()),
        ]

    def remove(self) -> None:
        """Show all rows from now on, all of which are then in use."""
        self.widen()
        for parameter in self.parameters:
            mark_rows_in_use(parameter, None)
        for hook in self._hooks:
            hook.remove()

    def narrow(self) -> None:
        """Narrow the parameters. Call it before the forward pass of a step, without gradients."""
        self._narrow([p for p in self.parameters if is_owned(p) or not self.in_ddp], set_data_of_other_shape)

    def _narrow(self, parameters: Iterable[Tensor], set_data: SetData) -> None:
        for parameter in parameters:
            state = self._optimizer.state.get(parameter)
            whole = parameter.data
            used = in_use(parameter, whole)
            if not state or len(used) == len(whole):
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == whole.shape:
                    self._states.append((state, key, value))
                    state[key] = in_use(parameter, value)
            self._weights.append((parameter, whole, set_data))
            grad = None if parameter.grad is None else in_use(parameter, parameter.grad)
            set_data(parameter, used)
            parameter.grad = grad

    def widen(self) -> None:
        for parameter, whole, set_data in self._weights:
            parameter.grad = None
            set_data(parameter, whole)
        for state, key, value in self._states:
            state[key] = value
        self._weights, self._states = [], []
