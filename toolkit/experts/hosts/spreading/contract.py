"""Whether an experts module keeps what spreading its rows relies on: tried on a few rows, before they are spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError, one_line
from toolkit.experts.hosts.spreading.foreign import compute_rows
from toolkit.experts.layer.dispatch.dispatch import LocalDispatcher
from toolkit.experts.placement.placement import contiguous

ROWS = 6
MOST_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""The largest relative difference, by precision; parts may be computed in another. A broken contract differs by a tenth
or more."""


@torch.no_grad()
def check_experts(name: str, module: nn.Module) -> None:
    """Compare a few rows through `module` with the same rows sent to two of its experts alone, in slots of their own.

    Parameters must have a row per expert. The rows of two experts, and buffers with a row per expert, have random
    values meanwhile. Raises UserError, the same on every rank, where outputs differ or are no tensor like the input.
    """
    parameters = dict(module.named_parameters(recurse=False))
    first = next(iter(parameters.values()))
    if first.is_meta or isinstance(first, DTensor) or first.dtype not in MOST_ROUNDING:
        return  # nothing to compute with yet, or quantised
    draws = torch.Generator().manual_seed(0)
    experts = int(module.num_experts)  # type: ignore[arg-type]
    chosen = torch.tensor([experts - 1, 0][:experts], device=first.device)
    slots_TK = (torch.arange(ROWS)[:, None] + torch.arange(len(chosen))).remainder(len(chosen)).to(first.device)
    weights_TK = (0.2 + 0.3 * torch.rand(slots_TK.shape, generator=draws)).to(first)
    kind = f"the experts at {name!r} ({type(module).__name__})"
    with _random_rows(module, experts, chosen, draws):
        x_TD = _accepted(kind, module, chosen[slots_TK], weights_TK, draws)
        for weights, remedy in (
            (torch.ones_like(weights_TK), "keep what differs between experts in parameters with a row for each expert"),
            (weights_TK, "multiply the outputs of experts by their weights, not what they compute them from"),
        ):
            whole_TD = module.forward(x_TD, chosen[slots_TK], weights)
            if not isinstance(whole_TD, Tensor) or whole_TD.shape != x_TD.shape:
                raise UserError(f"{kind} return {_described(whole_TD)}: return one tensor of the shape of the input.")
            with _only(module, parameters, chosen):
                spread_TD = _one_by_one(module.forward, x_TD, slots_TK, weights, len(chosen))
            difference = ((whole_TD - spread_TD).norm() / whole_TD.norm().clamp(min=1e-30)).item()
            if not difference <= MOST_ROUNDING[first.dtype]:
                buffers = [key for key, value in module.named_buffers() if _has_rows(value, experts)]
                held = f", and buffer {buffers[0]!r} is not moved with them" if buffers else ""
                raise UserError(
                    f"{kind} compute something else where each is on a rank of its own{held} (relative difference "
                    f"{difference:.2g}): {remedy}."
                )


def _one_by_one(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor], x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, slots: int
) -> Tensor:
    """(T, D), as a rank with `slots` computes it."""
    dispatcher = LocalDispatcher(contiguous(slots, 1))
    rows, plan = dispatcher.dispatch(x_TD, slots_TK)
    return dispatcher.combine(compute_rows(forward, rows, plan.rows_per_slot), plan, weights_TK)


def _accepted(kind: str, module: nn.Module, ids_TK: Tensor, weights_TK: Tensor, draws: torch.Generator) -> Tensor:
    """(T, D): rows of a width that `module` takes, which is among its sizes."""
    sizes = [value for value in vars(module).values() if type(value) is int and value > 0]
    sizes += [size for parameter in module.parameters(recurse=False) for size in parameter.shape[1:]]
    refusal = "it has no sizes"
    for width in dict.fromkeys(sizes):
        x_TD = torch.randn(ROWS, width, generator=draws).to(weights_TK)
        try:
            found = module.forward(x_TD, ids_TK, weights_TK)
        except Exception as error:
            refusal = one_line(error)
            continue
        if not isinstance(found, Tensor) or found.shape == x_TD.shape:
            return x_TD
        refusal = f"it returned {_described(found)}"
    raise UserError(
        f"{kind} cannot be called with hidden (T, D), expert ids (T, K) and weights (T, K) ({refusal}): "
        "give them that interface, where tokens choose experts."
    )


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _has_rows(value: Tensor, experts: int) -> bool:
    return value.ndim > 0 and len(value) == experts and value.is_floating_point()


@contextmanager
def _random_rows(module: nn.Module, experts: int, chosen: Tensor, draws: torch.Generator) -> Iterator[None]:
    """Give the rows of `chosen` experts random values, in evaluation mode."""
    rows_of = [value for value in (*module.parameters(recurse=False), *module.buffers()) if _has_rows(value, experts)]
    before = [value[chosen] for value in rows_of]
    was_training = module.training
    try:
        for value, rows in zip(rows_of, before, strict=True):
            spread = max(rows.shape[1:], default=1) ** -0.5
            value[chosen] = (torch.randn(rows.shape, generator=draws) * spread).to(rows)
        module.eval()
        yield
    finally:
        module.train(was_training)
        for value, rows in zip(rows_of, before, strict=True):
            value[chosen] = rows


@contextmanager
def _only(module: nn.Module, parameters: dict[str, nn.Parameter], chosen: Tensor) -> Iterator[None]:
    """Leave `module` the rows of `chosen` experts, as spreading does."""
    before, experts = {name: parameter.data for name, parameter in parameters.items()}, module.num_experts
    try:
        for parameter in parameters.values():
            parameter.data = parameter.data[chosen]
        module.num_experts = len(chosen)  # type: ignore[assignment]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]
        module.num_experts = experts
