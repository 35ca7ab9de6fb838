"""An experts implementation for transformers that does not sort rows which a dispatcher has sorted already.

`experts_implementation="toolkit"` works for any experts module, sharded or not, in any floating type. Rows from a
dispatcher are in order of slots and carry `rows_per_slot`, so they are multiplied as they are; others are sorted first.
Gated SiLU experts without biases run as one autograd node.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from toolkit.compat import apply_gate, has_default_gate, register_experts_function
from toolkit.hosts.foreign import in_order_of_slots, slots_of_rows
from toolkit.moe.feed_forward import GroupedFeedForward
from toolkit.moe.grouped_mm import accepts, cast_as_autocast_would, grouped_mm

NAME = "toolkit"


def use_toolkit_kernel() -> str:
    """Make `experts_implementation="toolkit"` known to transformers; returns that name."""
    register_experts_function(NAME, experts_forward)
    return NAME


def experts_forward(
    experts: Any, hidden_TD: Float[Tensor, "T D"], ids_TK: Int[Tensor, "T K"], weights_TK: Float[Tensor, "T K"]
) -> Float[Tensor, "T D"]:
    """The forward of an experts module of transformers, (T, D) to (T, D)."""
    return in_order_of_slots(_feed_forward, experts, hidden_TD, ids_TK, weights_TK)


def _feed_forward(experts: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Tensor:
    dtype = rows_ND.dtype
    rows_ND, up, down = cast_as_autocast_would(rows_ND, experts.gate_up_proj, experts.down_proj)
    if not experts.is_transposed:  # (S, out, in) and (S, in, out) are both in use: go on with the latter
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if _is_plain(experts) and accepts(rows_ND, up) and accepts(rows_ND, down):
        ends_S = rows_per_slot.cumsum(0).int()
        return GroupedFeedForward.apply(rows_ND, up.transpose(1, 2), down, ends_S).to(dtype)
    slot_N = slots_of_rows(rows_per_slot, len(rows_ND)).squeeze(1)
    hidden = grouped_mm(rows_ND, up, rows_per_slot)
    if experts.has_bias:
        hidden = hidden + experts.gate_up_proj_bias[slot_N]
    out = grouped_mm(apply_gate(experts, hidden).to(down.dtype), down, rows_per_slot)
    if experts.has_bias:
        out = out + experts.down_proj_bias[slot_N]
    return out.to(dtype)


def _is_plain(experts: Any) -> bool:
    """Whether the experts compute `down(silu(gate(x)) * up(x))` with the gate's rows before those of `up`."""
    from transformers.activations import SiLUActivation

    return (
        isinstance(getattr(experts, "act_fn", None), (nn.SiLU, SiLUActivation))
        and experts.is_concatenated
        and not experts.has_bias
        and has_default_gate(experts)
    )
