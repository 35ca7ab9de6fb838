"""Call an experts module with rows in order of slots, on whichever ranks its experts are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.recompute import decide, in_reentrant_forward, recomputing
from toolkit.experts.layer.rows import Copy, WeightedSum, sort_by_slot
from toolkit.experts.layer.stack import ExpertStack

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Forward = Callable[..., Tensor]
"""Forward of an experts module: (hidden (T, D), expert ids (T, K), weights (T, K)) to (T, D)."""


class LowRank(NamedTuple):
    """Low-rank update of one stacked parameter of experts: `scaling * B @ A`, slot by slot."""

    a_SRI: Float[Tensor, "S R I"]
    b_SOR: Float[Tensor, "S O R"]
    scaling: float


def slots_of_rows(rows_per_slot: Int[Tensor, " S"], num_rows: int) -> Int[Tensor, "N 1"]:
    """Return the slot of each of `num_rows` rows in order of slots, int64, as expert ids (N, 1) of a top-1 router."""
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
    """Run the forward of `experts` by a function of (experts, rows in order of slots, rows per slot).

    Rows from a dispatcher are in that order already, each with one expert of weight 1; others are sorted first.
    """
    rows_per_slot = getattr(ids_TK, "rows_per_slot", None)
    if rows_per_slot is not None:
        return compute(experts, hidden_TD, rows_per_slot)
    ids_TK = decide(lambda: ids_TK)  # a recomputation could choose other experts
    order = sort_by_slot(ids_TK, experts.num_experts, ids_TK.numel())  # type: ignore[arg-type]
    rows_ND = compute(experts, Copy.apply(hidden_TD, order), order.rows_per_slot)
    return WeightedSum.apply(rows_ND, weights_TK, order)


def run_experts(
    module: nn.Module,
    stack: ExpertStack,
    forward: Forward,
    x_TD: Float[Tensor, "T D"],
    ids_TK: Int[Tensor, "T K"],
    weights_TK: Float[Tensor, "T K"],
) -> Tensor:
    """Return the weighted sum of each token's expert outputs, shape (T, D). A collective of the EP group.

    `forward` is the forward of the experts module `module` for this rank's slots. Raises UserError for invalid ids.
    """
    # On a GPU the kernels that sort by ids fail for an invalid one, and looking at them here would be a host sync.
    if ids_TK.device.type == "cpu" and ids_TK.numel() and not torch.compiler.is_compiling():
        least, greatest = (int(each) for each in ids_TK.aminmax())
        if least < 0 or greatest >= stack.num_experts:
            raise UserError(
                f"expert ids: {least if least < 0 else greatest} in a layer of {stack.num_experts} experts. "
                "For a token without an expert, give any expert's id and the weight 0."
            )
    rows_ND, dispatched = stack.dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    parameters = {*stack.parameters.values(), *module.parameters()}
    y_ND = stack.timed(len(rows_ND), compute_rows, forward, rows_ND, dispatched.rows_per_slot, parameters)
    y_TD = stack.dispatcher.combine(y_ND, dispatched)
    if not recomputing():
        # Not `module.training`: a model that was read from a folder is in eval mode until somebody calls train().
        training = torch.is_grad_enabled() or in_reentrant_forward()
        stack.record(dispatched.plan, ids_TK, x_TD, weights_TK, y_TD, training=training)
    return y_TD


def compute_rows(
    forward: Forward,
    rows_ND: Float[Tensor, "N D"],
    rows_per_slot: Int[Tensor, " S"],
    parameters: Iterable[Tensor] = (),
) -> Float[Tensor, "N D"]:
    """Return the outputs of an experts module's `forward` for rows in order of slots, each of one expert, weight 1.

    Without rows the `parameters` get gradients of zero.
    """
    if len(rows_ND):
        slot_N1 = slots_of_rows(rows_per_slot, len(rows_ND))
        return forward(rows_ND, slot_N1, rows_ND.new_ones(len(rows_ND), 1))
    with torch.no_grad():  # for the type of the outputs; a gradient through a row of zeros may be NaN
        outputs = forward(rows_ND.new_zeros(1, rows_ND.shape[1]), rows_per_slot.new_zeros(1, 1), rows_ND.new_ones(1, 1))
    # Parameters and all-to-all stay in the graph: their backward pass is a collective, too.
    nothing = [p.flatten()[:0].sum() for p in parameters if p.requires_grad]
    return rows_ND.to(outputs.dtype) + sum(nothing)
