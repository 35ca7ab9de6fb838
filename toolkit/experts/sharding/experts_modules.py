"""Experts modules of any model: how one and its router are found, and how one is called with rows in order of slots.

An experts module has an integer `num_experts`, parameters stacked along dimension 0, and is called with (hidden (T, D),
expert ids (T, K), weights (T, K)). Its router is the sibling with one weight row per expert.

T tokens, D model width, E experts, K experts per token, S slots of this rank, N (token, expert) pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.dispatcher import LocalDispatcher
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.recompute import in_reentrant_forward, recomputing
from toolkit.experts.layer.routing_log import Choices
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.placement.placement import contiguous

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class LowRank(NamedTuple):
    """What is added to one stacked parameter of experts: `scaling * B @ A`, slot by slot."""

    a_SRI: Float[Tensor, "S R I"]
    b_SOR: Float[Tensor, "S O R"]
    scaling: float


def has_stacked_parameters(module: nn.Module) -> bool:
    """Whether all of the module's own parameters have one row for each of its `num_experts`."""
    experts, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    stacked = all(p.ndim >= 2 and p.shape[0] == experts for p in parameters)
    return isinstance(experts, int) and bool(parameters) and stacked


def layers_with_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield our `MoE` layers, and modules outside of them that hold stacked experts, by name in order of modules."""
    ours: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            ours.append(f"{name}." if name else "")
            yield name, module
        elif not any(name.startswith(prefix) for prefix in ours) and (
            "expert_stack" in vars(module) or has_stacked_parameters(module)
        ):
            yield name, module


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that hold stacked experts, except in our `MoE` layers, by name."""
    return {
        name: module
        for name, module in layers_with_experts(model)
        if not isinstance(module, MoE) and ("expert_stack" in vars(module) or rows_of_router(module) is None)
    }


def rows_of_router(module: nn.Module) -> int | None:
    """Return the number of experts that `module` chooses from if it is a router, else None."""
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else None


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the router of each of the `experts_modules` of `model`, by the name of the experts module.

    Raises:
        UserError: An experts module has no sibling that could be its router, or several.
    """
    found = {}
    for name, experts in experts_modules(model).items():
        block = model.get_submodule(outside_wrappers(name).rpartition(".")[0])
        siblings: list[Any] = list(block.children())
        children = [m.get_base_layer() if hasattr(m, "get_base_layer") else m for m in siblings]
        candidates = [m for m in children if rows_of_router(m) == num_experts(experts)]
        if len(candidates) != 1:
            raise UserError(
                f"model: {len(candidates)} modules next to the experts at {name!r} could be their router. "
                "Use a model with one router per MoE layer, with a weight row per expert."
            )
        found[name] = candidates[0]
    return found


def num_experts(experts: nn.Module) -> int:
    """Return the number of experts of a layer over all ranks. A sharded experts module counts its slots itself."""
    stack = getattr(experts, "expert_stack", None)
    return int(stack.num_experts if stack is not None else experts.num_experts)  # type: ignore[arg-type]


def outside_wrappers(name: str) -> str:
    """Return the name of the outermost wrapper that has the module `name` as its `base_layer`, or `name` itself."""
    return re.sub(r"(\.base_layer)+$", "", name)


def slots_of_rows(rows_per_slot: Int[Tensor, " S"], num_rows: int) -> Int[Tensor, "N 1"]:
    """int64 (N, 1): the slot of each of `num_rows` rows in order of slots, as expert ids of a top-1 router."""
    slots = torch.arange(len(rows_per_slot), device=rows_per_slot.device)
    slot_N1 = slots.repeat_interleave(rows_per_slot, output_size=num_rows).unsqueeze(1)
    slot_N1.rows_per_slot = rows_per_slot  # type: ignore[attr-defined]  # spares `in_order_of_slots` a sort
    return slot_N1


def in_order_of_slots(
    compute: Callable[[nn.Module, Tensor, Tensor], Tensor],
    experts: nn.Module,
    hidden_TD: Float[Tensor, "T D"],
    ids_TK: Int[Tensor, "T K"],
    weights_TK: Float[Tensor, "T K"],
) -> Float[Tensor, "T D"]:
    """The forward of `experts` by a function of (experts, rows in order of slots, rows per slot).

    Rows from a dispatcher are in that order already, each with one expert of weight 1; others are sorted first.
    """
    rows_per_slot = getattr(ids_TK, "rows_per_slot", None)
    if rows_per_slot is not None:
        return compute(experts, hidden_TD, rows_per_slot)
    dispatcher = LocalDispatcher(contiguous(experts.num_experts, 1))  # type: ignore[arg-type]
    rows, dispatched = dispatcher.dispatch(hidden_TD, ids_TK, weights_TK)
    return dispatcher.combine(compute(experts, rows, dispatched.rows_per_slot), dispatched)


def run_experts(
    module: nn.Module,
    stack: ExpertStack,
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    x_TD: Float[Tensor, "T D"],
    ids_TK: Int[Tensor, "T K"],
    weights_TK: Float[Tensor, "T K"],
) -> Tensor:
    """(T, D): the weighted sum of each token's expert outputs, on whichever ranks the experts are. A collective.

    `forward` is that of the experts module `module`, for this rank's slots. Raises UserError for invalid expert ids.
    """
    _require_expert_ids(ids_TK, stack.num_experts)
    rows_ND, dispatched = stack.dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    y_TD = stack.dispatcher.combine(compute_rows(forward, rows_ND, dispatched.rows_per_slot), dispatched)
    if not recomputing():
        training = module.training and (torch.is_grad_enabled() or in_reentrant_forward())
        stack.record(dispatched.plan, Choices(ids_TK, None), x_TD, weights_TK, y_TD, training=training)
    return y_TD


def _require_expert_ids(ids_TK: Int[Tensor, "T K"], num_experts: int) -> None:
    # On a GPU the kernels that sort by ids fail for an invalid one, and looking at them here would be a host sync.
    if ids_TK.device.type != "cpu" or torch.compiler.is_compiling() or not ids_TK.numel():
        return
    least, greatest = (int(each) for each in ids_TK.aminmax())
    if least < 0 or greatest >= num_experts:
        raise UserError(
            f"expert ids: {least if least < 0 else greatest} in a layer of {num_experts} experts. "
            "For a token without an expert, give any expert's id and the weight 0."
        )


def compute_rows(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor], rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]
) -> Tensor:
    """(N, D): the outputs of an experts module's `forward` for rows in order of slots, each of one expert, weight 1."""
    if len(rows_ND):
        slot_N1 = slots_of_rows(rows_per_slot, len(rows_ND))
        return forward(rows_ND, slot_N1, rows_ND.new_ones(len(rows_ND), 1))
    # A row of zeros keeps parameters and all-to-all in the graph: their backward pass is a collective, too.
    row, slot = rows_ND.sum(0, keepdim=True), rows_per_slot.new_zeros(1, 1)
    return forward(row, slot, rows_ND.new_ones(1, 1))[:0]
