"""Lazy loading: experts whose rows stay in the files of a pretrained model until they are sharded.

Their parameters have the shapes of all experts and a single number in memory, so that adapters can be added, optimizers
made, and the model moved and cast. They cannot be called, and have no values to save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.compat import move_as_usual, move_by
from toolkit.experts.parallel.collectives import together

ReadRows = Callable[[nn.Module, Sequence[int]], dict[str, Tensor]]
"""(experts module, experts) to their rows by parameter, with zeros for an `EMPTY_ROW`: on the device and in the type of
the parameter, or packed, with further parameters that it gives the module."""


def load_lazily(module: nn.Module, read: ReadRows) -> None:
    """Have `read` give the rows of the experts module `module`, whose parameters expand a single number each."""
    module.read_rows = read  # type: ignore[assignment]
    module.hooks_until_read = (  # type: ignore[assignment]
        module.register_forward_pre_hook(_refuse_forward),
        module.register_state_dict_post_hook(_without_values),
    )
    move_by(module, _move_numbers, [name for name, _ in module.named_parameters(recurse=False)])


def read_rows(module: nn.Module, experts: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of `experts` by parameter, once; nothing for a module that is not loaded lazily.

    A collective if it is: an error of one rank is raised on all.
    """
    if "read_rows" not in vars(module):
        return {}
    rows: dict[str, Tensor] = {}
    together(lambda: rows.update(module.read_rows(module, experts)))  # type: ignore[operator]
    for hook in module.hooks_until_read:  # type: ignore[union-attr]
        hook.remove()
    move_as_usual(module)
    del module.read_rows, module.hooks_until_read
    return rows


def _move_numbers(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Have `to`, `half` and `cuda` change the one number that each parameter is."""
    for parameter in module.parameters(recurse=False):
        shape = parameter.shape
        parameter.data = change(parameter.data[(slice(1),) * parameter.ndim]).expand(shape)


def _refuse_forward(*_: Any) -> NoReturn:
    raise UserError(
        "model: its experts are still in their files. Call ExpertParallel.prepare or shard_experts first, also on one "
        "process."
    )


def _without_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put parameters on the meta device in a state dict: writing it raises, because there are no values."""
    for name, parameter in module.named_parameters(recurse=False):
        if state.get(prefix + name, parameter) is not parameter:  # with `keep_vars` it is
            state[prefix + name] = parameter.detach().to("meta")
