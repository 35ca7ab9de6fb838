"""Whether an experts module keeps what spreading its rows relies on: tried on a few rows, before they are spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError, one_line
from toolkit.experts.layer.dispatcher import LocalDispatcher
from toolkit.experts.placement.placement import contiguous
from toolkit.experts.sharding.foreign import compute_rows
from toolkit.experts.sharding.waiting_rows import is_waiting

ROWS = 6
MOST_SLOTS = 8
"""Experts that are tried at a time, because their rows are copied."""
FEW = 4
"""Experts that a module whose rows are elsewhere gets memory for."""
IN_ROWS = "keep what differs between experts in parameters with a row for each expert"
MOST_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""The largest relative difference, by precision; parts may be computed in another. A broken contract differs by a tenth
or more."""


@torch.no_grad()
def check_experts(name: str, module: nn.Module) -> None:
    """Compare a few rows through `module` with the same rows sent to some of its experts alone, in slots of their own.

    Each expert is tried, a few at a time, so that every id is in another slot than its own or its slot has another
    expert. Parameters must have a row per expert. The rows of the experts that are tried, and buffers with a row per
    expert, have random values meanwhile. A module whose rows are elsewhere gets memory for a few experts, and then, so
    that each id is tried, for one row that all experts have. Raises UserError, the same on every rank, where outputs
    differ or are no tensor like the input.
    """
    first = next(module.parameters(recurse=False))
    if first.is_meta or isinstance(first, DTensor) or first.dtype not in MOST_ROUNDING:
        return  # nothing to compute with yet, or quantised
    kind, draws = f"the experts at {name!r} ({type(module).__name__})", torch.Generator().manual_seed(0)
    if not is_waiting(module):
        _check_each(kind, module, draws)
        return
    experts = int(module.num_experts)  # type: ignore[arg-type]
    few = min(experts, FEW)
    with _having(module, few, lambda data: data.new_zeros(few, *data.shape[1:])):
        _check_each(kind, module, draws)
    with _having(module, experts, lambda data: _random(data[:1], draws).expand(data.shape)):
        _check_alike(kind, module, draws)


def _check_alike(kind: str, module: nn.Module, draws: torch.Generator) -> None:
    """Compare what the experts of `module`, all of which have one row, make of one token: each with the first, which
    has been tried."""
    first, experts = next(module.parameters(recurse=False)), int(module.num_experts)  # type: ignore[arg-type]
    every_E1 = torch.arange(experts, device=first.device).unsqueeze(1)
    expected_D: Tensor | None = None
    with _random_rows(module, experts, every_E1[:, 0], draws):
        # In which no expert has two rows: one that pads them may take a wrong width for right.
        ones_E1 = torch.ones_like(every_E1).to(first)
        width = _accepted_width(kind, module, every_E1[:MOST_SLOTS], ones_E1[:MOST_SLOTS], draws)
        token_1D = torch.randn(1, width, generator=draws).to(first)
        for ids_T1, ones_T1 in zip(every_E1.split(MOST_SLOTS), ones_E1.split(MOST_SLOTS), strict=True):
            y_TD = module.forward(token_1D.repeat(len(ids_T1), 1), ids_T1, ones_T1)
            expected_D = y_TD[0] if expected_D is None else expected_D
            _refuse_other(kind, module, (y_TD - expected_D).norm(dim=1).max() / expected_D.norm(), IN_ROWS)


def _check_each(kind: str, module: nn.Module, draws: torch.Generator) -> None:
    """Try each expert of `module`, a few at a time."""
    width: int | None = None
    first, experts = next(module.parameters(recurse=False)), int(module.num_experts)  # type: ignore[arg-type]
    slots = max(min(experts, 2), min(experts // 2, MOST_SLOTS))
    for start in range(0, experts, slots):
        chosen = torch.arange(start + 1, min(start + slots, experts) + 1, device=first.device) % experts
        with _random_rows(module, experts, chosen, draws):
            width = _check_some(kind, module, chosen, width, draws)


def _check_some(kind: str, module: nn.Module, chosen: Tensor, width: int | None, draws: torch.Generator) -> int:
    """Compare rows through the experts `chosen`, of a width that is looked for if it is None; return the width."""
    first, slots = next(module.parameters(recurse=False)), len(chosen)
    rows = torch.arange(max(ROWS, slots), device=first.device)
    slots_TK = (rows[:, None] + torch.arange(min(slots, 2), device=first.device)).remainder(slots)
    weights_TK = (0.2 + 0.3 * torch.rand(slots_TK.shape, generator=draws)).to(first)
    if width is None:
        width = _accepted_width(kind, module, chosen[slots_TK], weights_TK, draws)
    x_TD = torch.randn(len(rows), width, generator=draws).to(first)
    for weights, remedy in (
        (torch.ones_like(weights_TK), IN_ROWS),
        (weights_TK, "multiply the outputs of experts by their weights, not what they compute them from"),
    ):
        whole_TD = module.forward(x_TD, chosen[slots_TK], weights)
        if not isinstance(whole_TD, Tensor) or whole_TD.shape != x_TD.shape:
            raise UserError(f"{kind} return {_described(whole_TD)}: return one tensor of the shape of the input.")
        with _having(module, len(chosen), lambda data: data[chosen]):
            spread_TD = _one_by_one(module.forward, x_TD, slots_TK, weights, slots)
        _refuse_other(kind, module, (whole_TD - spread_TD).norm() / whole_TD.norm(), remedy)
    return width


def _refuse_other(kind: str, module: nn.Module, difference: Tensor, remedy: str) -> None:
    """Raise UserError unless the relative `difference` is one of rounding. It is NaN where no expert was found."""
    if not difference.item() <= MOST_ROUNDING[next(module.parameters(recurse=False)).dtype]:
        experts = int(module.num_experts)  # type: ignore[arg-type]
        buffers = [key for key, value in module.named_buffers() if _has_rows(value, experts)]
        held = f", and buffer {buffers[0]!r} is not moved with them" if buffers else ""
        raise UserError(
            f"{kind} compute something else where each is on a rank of its own{held} (relative difference "
            f"{difference.item():.2g}): {remedy}."
        )


def _one_by_one(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor], x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, slots: int
) -> Tensor:
    """(T, D), as a rank with `slots` computes it."""
    dispatcher = LocalDispatcher(contiguous(slots, 1))
    rows, dispatched = dispatcher.dispatch(x_TD, slots_TK, weights_TK)
    return dispatcher.combine(compute_rows(forward, rows, dispatched.rows_per_slot), dispatched)


def _accepted_width(kind: str, module: nn.Module, ids_TK: Tensor, weights_TK: Tensor, draws: torch.Generator) -> int:
    """The width of rows that `module` takes, which is among its sizes."""
    sizes = [value for value in vars(module).values() if type(value) is int and value > 0]
    sizes += [size for parameter in module.parameters(recurse=False) for size in parameter.shape[1:]]
    refusal = "it has no sizes"
    for width in dict.fromkeys(sizes):
        x_TD = torch.randn(len(ids_TK), width, generator=draws).to(weights_TK)
        try:
            found = module.forward(x_TD, ids_TK, weights_TK)
        except Exception as error:
            refusal = one_line(error)
            continue
        if not isinstance(found, Tensor) or found.shape == x_TD.shape:
            return width
        refusal = f"it returned {_described(found)}"
    raise UserError(
        f"{kind} cannot be called with hidden (T, D), expert ids (T, K) and weights (T, K) ({refusal}): "
        "give them that interface, where tokens choose experts."
    )


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _has_rows(value: Tensor, experts: int) -> bool:
    return value.ndim > 0 and len(value) == experts and value.is_floating_point()


def _random(like: Tensor, draws: torch.Generator) -> Tensor:
    """Rows of the shape of `like`, whose products stay of the size of what they multiply."""
    spread = max(like.shape[1:], default=1) ** -0.5
    return (torch.randn(like.shape, generator=draws) * spread).to(like)


@contextmanager
def _random_rows(module: nn.Module, experts: int, chosen: Tensor, draws: torch.Generator) -> Iterator[None]:
    """Give the rows of `chosen` experts random values, in evaluation mode."""
    having = [value for value in (*module.parameters(recurse=False), *module.buffers()) if _has_rows(value, experts)]
    rows_of = [value for value in having if value.stride(0)]  # else one row is that of all
    before = [value[chosen] for value in rows_of]
    was_training = module.training
    try:
        for value, rows in zip(rows_of, before, strict=True):
            value[chosen] = _random(rows, draws)
        module.eval()
        yield
    finally:
        module.train(was_training)
        for value, rows in zip(rows_of, before, strict=True):
            value[chosen] = rows


@contextmanager
def _having(module: nn.Module, experts: int, rows: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Leave `module` as many `experts`, and what `rows` makes of each of its parameters."""
    before, whole = module.num_experts, [(parameter, parameter.data) for parameter in module.parameters(recurse=False)]
    try:
        for parameter, data in whole:
            parameter.data = rows(data)
        module.num_experts = experts  # type: ignore[assignment]
        yield
    finally:
        for parameter, data in whole:
            parameter.data = data
        module.num_experts = before
