"""Experts whose rows are elsewhere until they are spread, such as in the files of a pretrained model.

Their parameters have the shapes of all experts and a single number in memory, so that adapters can be added, optimizers
made, and the model moved and cast. They cannot be called, and have no values to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from toolkit.errors import UserError

ReadRows = Callable[[nn.Module, Sequence[int]], dict[str, Tensor]]
"""(experts module, experts) to their rows by the name of the parameter, with zeros for an `EMPTY_ROW`: on the device
and in the type of the parameter, or packed, with more parameters that it gives the module."""


def wait_for_rows(module: nn.Module, read: ReadRows) -> None:
    """Have the experts module `module`, whose parameters expand a single number each, wait for rows of `read`."""
    module.read_rows = read  # type: ignore[assignment]
    module._apply = partial(_apply_to_numbers, module)
    module.register_forward_pre_hook(_refuse_forward)
    module._register_state_dict_hook(_without_values)


def is_waiting(module: nn.Module) -> bool:
    """Return whether the rows of `module` are elsewhere."""
    return "read_rows" in vars(module)


def rows_from_files(module: nn.Module, experts: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of `experts` by the name of the parameter, of a module that waits no more; nothing for one that
    did not."""
    if not is_waiting(module):
        return {}
    rows = module.read_rows(module, experts)  # type: ignore[operator]
    del module.read_rows, module._apply
    for hooks, ours in ((module._forward_pre_hooks, _refuse_forward), (module._state_dict_hooks, _without_values)):
        for number in [number for number, hook in hooks.items() if hook is ours]:
            del hooks[number]
    return rows


@contextmanager
def a_few_rows(module: nn.Module, rows: int) -> Iterator[None]:
    """Give a module that waits memory for `rows` experts, to try how it is called; changes no other."""
    if not is_waiting(module):
        yield
        return
    experts, whole = module.num_experts, [(p, p.data) for p in module.parameters(recurse=False)]
    module.num_experts = min(int(experts), rows)  # type: ignore[arg-type,assignment]
    try:
        for parameter, data in whole:
            parameter.data = data.new_zeros(module.num_experts, *data.shape[1:])  # type: ignore[call-overload]
        yield
    finally:
        module.num_experts = experts
        for parameter, data in whole:
            parameter.data = data


def _apply_to_numbers(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """What `to`, `half` and `cuda` do to a waiting module: what they change of a parameter is its one number."""
    for parameter in module.parameters(recurse=False):
        shape = parameter.shape
        parameter.data = change(parameter.data[(slice(1),) * parameter.ndim]).expand(shape)
    whole = module._parameters
    module._parameters = {}
    try:
        return type(module)._apply(module, change, recurse)
    finally:
        module._parameters = whole


def _refuse_forward(*_: Any) -> NoReturn:
    raise UserError(
        "the experts of this model are still in their files: spread them first, by ExpertParallel.prepare or "
        "spread_experts, also on one process."
    )


def _without_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave names and shapes in a state dict: whoever writes it finds that there are no values."""
    for name, parameter in module.named_parameters(recurse=False):
        if state.get(prefix + name, parameter) is not parameter:  # which `keep_vars` asks for
            state[prefix + name] = parameter.detach().to("meta")
