"""Experts whose rows are elsewhere until they are spread, such as in the files of a pretrained model.

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
"""(experts module, experts) to their rows by the name of the parameter, with zeros for an `EMPTY_ROW`: on the device
and in the type of the parameter, or packed, with more parameters that it gives the module."""


def wait_for_rows(module: nn.Module, read: ReadRows) -> None:
    """Have the experts module `module`, whose parameters expand a single number each, wait for rows of `read`."""
    module.read_rows = read  # type: ignore[assignment]
    module.hooks_while_waiting = (  # type: ignore[assignment]
        module.register_forward_pre_hook(_refuse_forward),
        module.register_state_dict_post_hook(_without_values),
    )
    move_by(module, _move_numbers, [name for name, _ in module.named_parameters(recurse=False)])


def is_waiting(module: nn.Module) -> bool:
    """Return whether the rows of `module` are elsewhere."""
    return "read_rows" in vars(module)


def rows_from_files(module: nn.Module, experts: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of `experts` by the name of the parameter, of a module that waits no more; nothing for one that
    did not. A collective where it waits: what one rank cannot read is raised on all."""
    if not is_waiting(module):
        return {}
    rows: dict[str, Tensor] = {}
    together(lambda: rows.update(module.read_rows(module, experts)))  # type: ignore[operator]
    for hook in module.hooks_while_waiting:  # type: ignore[union-attr]
        hook.remove()
    move_as_usual(module)
    del module.read_rows, module.hooks_while_waiting
    return rows


def _move_numbers(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Of a waiting module, `to`, `half` and `cuda` change the one number that a parameter is."""
    for parameter in module.parameters(recurse=False):
        shape = parameter.shape
        parameter.data = change(parameter.data[(slice(1),) * parameter.ndim]).expand(shape)


def _refuse_forward(*_: Any) -> NoReturn:
    raise UserError(
        "the experts of this model are still in their files: spread them first, by ExpertParallel.prepare or "
        "shard_experts, also on one process."
    )


def _without_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave names and shapes in a state dict: whoever writes it finds that there are no values."""
    for name, parameter in module.named_parameters(recurse=False):
        if state.get(prefix + name, parameter) is not parameter:  # which `keep_vars` asks for
            state[prefix + name] = parameter.detach().to("meta")
