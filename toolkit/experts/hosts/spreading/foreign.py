"""Experts modules that are not ours: how one is recognised, and how it is called with rows in order of slots.

The interface is that of transformers' own expert parallelism: a module with `num_experts` whose parameters are stacked
along dimension 0, called with (hidden (T, D), expert ids (T, K), weights (T, K)).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.dispatch.dispatch import LocalDispatcher
from toolkit.experts.layer.recompute import in_reentrant_forward, recomputing
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.placement.placement import contiguous
from toolkit.experts.routing.routing_log import Choices


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


def num_experts(experts: nn.Module) -> int:
    """Over all ranks: of our layer, or of a foreign module, whose own number is of this rank once it is sharded."""
    stack = getattr(experts, "expert_stack", None)
    return int(stack.num_experts if stack is not None else experts.num_experts)  # type: ignore[arg-type]


def outside_wrappers(name: str) -> str:
    """The name of the outermost of PEFT's wrappers around the module `name`, or that module's where there are none."""
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
    rows, plan = dispatcher.dispatch(hidden_TD, ids_TK)
    return dispatcher.combine(compute(experts, rows, plan.rows_per_slot), plan, weights_TK)


def run_experts(
    module: nn.Module,
    stack: ExpertStack,
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    x_TD: Float[Tensor, "T D"],
    ids_TK: Int[Tensor, "T K"],
    weights_TK: Float[Tensor, "T K"],
) -> Tensor:
    """(T, D): each token's weighted outputs of its experts, on whichever ranks of `stack` they are. A collective.

    `forward` is that of the foreign `module`, which computes this rank's slots. Raises UserError for ids that are no
    expert's.
    """
    _refuse_no_expert(ids_TK, stack.num_experts)
    y_TD, plans = stack.dispatcher.mix(x_TD, ids_TK, weights_TK, lambda: partial(compute_rows, forward))
    if not recomputing():
        training = module.training and (torch.is_grad_enabled() or in_reentrant_forward())
        stack.record(plans, Choices(ids_TK, None), x_TD, y_TD, training=training)
    return y_TD


def _refuse_no_expert(ids_TK: Int[Tensor, "T K"], num_experts: int) -> None:
    # On a GPU the kernels that sort by ids stop at such a one: to look at them here would be a host sync.
    if ids_TK.device.type != "cpu" or torch.compiler.is_compiling() or not ids_TK.numel():
        return
    least, greatest = (int(each) for each in ids_TK.aminmax())
    if least < 0 or greatest >= num_experts:
        raise UserError(
            f"expert id {least if least < 0 else greatest} in a layer of {num_experts} experts: "
            "give an assignment to no expert any expert's id, and the weight 0."
        )


def compute_rows(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor], rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]
) -> Tensor:
    """(N, D): the outputs of a foreign `forward` for rows in order of slots, each with one expert of weight 1."""
    if len(rows_ND):
        slot_N1 = slots_of_rows(rows_per_slot, len(rows_ND))
        return forward(rows_ND, slot_N1, rows_ND.new_ones(len(rows_ND), 1))
    # A row of zeros keeps parameters and exchange in the graph: their backward is a collective, too.
    row, slot = rows_ND.sum(0, keepdim=True), rows_per_slot.new_zeros(1, 1)
    return forward(row, slot, rows_ND.new_ones(1, 1))[:0]
