"""An experts implementation for transformers that does not sort rows again after a dispatcher has.

`experts_implementation="toolkit"` works for any experts module, sharded or not, in any floating type. Rows from a
dispatcher are in order of slots; other rows are sorted first. Gated SiLU experts without biases run as one autograd
node. Matrices of frozen experts may be packed (`quantization.py`) or in main memory
(`cpu_offload.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.experts.layer.feed_forward import GroupedFeedForward
from toolkit.experts.layer.grouped_mm import accepts, cast_as_autocast_would, grouped_mm
from toolkit.experts.layer.rows import Pairs
from toolkit.experts.sharding.layout import CalledByIds, LowRank, pairs_of, slots_of_rows
from toolkit.integrations.transformers.compat import (
    apply_gate,
    experts_implementation,
    has_default_gate,
    register_experts_function,
)
from toolkit.integrations.transformers.cpu_offload import RowsOnHost, is_on_host, rows_on
from toolkit.integrations.transformers.quantization import PackedRows, is_packed, parts_of_rows, unpacked

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NAME = "toolkit"
MOST_UNPACKED = 2**28
"""Bytes of a layer's packed matrices that are unpacked at a time: a GPU needs as much in addition."""


def use_toolkit_kernel() -> str:
    """Register `experts_implementation="toolkit"` with transformers, and return that name."""
    register_experts_function(NAME, experts_forward)
    return NAME


def projections(experts: nn.Module) -> tuple[str, ...]:
    """Return the matrices of an experts module in order of use; none for modules that are not described."""
    if not all(hasattr(experts, name) for name in ("is_concatenated", "is_transposed", "has_bias")):
        return ()
    return ("gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj")


def experts_forward(
    experts: Any, hidden_TD: Float[Tensor, "T D"], ids_TK: Int[Tensor, "T K"], weights_TK: Float[Tensor, "T K"]
) -> Float[Tensor, "T D"]:
    """Return the output (T, D) of an experts module of transformers."""
    return _compute_pairs(experts, hidden_TD, pairs_of(ids_TK, weights_TK, experts.num_experts))


def _compute_pairs(experts: Any, x_RD: Float[Tensor, "R D"], pairs: Pairs) -> Float[Tensor, "R D"]:
    y_RD = _in_one_node(experts, x_RD, pairs.order.rows_per_slot, pairs)
    if y_RD is None:
        y_RD = pairs.unpermute(_in_steps(experts, pairs.permute(x_RD), pairs.order.rows_per_slot))
    return y_RD


class TransformersLayout(CalledByIds, RowsOnHost, PackedRows):
    """Sharded experts of transformers with known projections."""

    config: Any
    low_rank: Mapping[str, list[LowRank]] = MappingProxyType({})
    """Adapters in use during a call, by the parameter that they adapt."""

    def compute_slots(self, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
        if self.low_rank or experts_implementation(self.config) == NAME:
            return feed_forward(self, rows_ND, rows_per_slot)
        return super().compute_slots(rows_ND, rows_per_slot)

    def compute_pairs(self, x_RD: Float[Tensor, "R D"], pairs: Pairs) -> Float[Tensor, "R D"]:
        if experts_implementation(self.config) == NAME:
            return _compute_pairs(self, x_RD, pairs)
        return super().compute_pairs(x_RD, pairs)


def feed_forward(experts: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
    """Return the outputs of an experts module of transformers for rows in order of slots."""
    y_ND = _in_one_node(experts, rows_ND, rows_per_slot)
    return _in_steps(experts, rows_ND, rows_per_slot) if y_ND is None else y_ND


def _in_steps(experts: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
    """Return the outputs of any experts, with autograd's own backward pass."""
    dtype = rows_ND.dtype
    first, last = projections(experts)
    low_rank = _low_rank_of(experts)
    hidden = _project(experts, first, rows_ND, rows_per_slot, low_rank.get(first, []))
    hidden = apply_gate(experts, hidden) if getattr(experts, "has_gate", True) else experts.act_fn(hidden)
    out = _project(experts, last, hidden, rows_per_slot, low_rank.get(last, []))
    if getattr(experts, "has_post_expert_norm", False):
        out = experts.post_expert_norm(out)
    return out.to(dtype)


def _in_one_node(
    experts: Any, x: Tensor, rows_per_slot: Int[Tensor, " S"], pairs: Pairs | None = None
) -> Tensor | None:
    """Return the outputs for rows in order of slots, or the weighted sums of `pairs`, from one autograd function; None
    for experts that it does not compute."""
    first, last = projections(experts)
    if _low_rank_of(experts) or _is_fetched(experts, first) or not _is_plain(experts):
        return None
    (rows, up), (_, down) = (_operands(experts, name, x) for name in (first, last))
    if not (accepts(rows, up) and accepts(rows, down)):
        return None
    ends_S = rows_per_slot.cumsum(0, dtype=torch.int32)
    of_pairs = () if pairs is None else (False, None, pairs.weights_RK, pairs.order, pairs.ranks)
    return GroupedFeedForward.apply(rows, up.transpose(1, 2), down, ends_S, *of_pairs).to(x.dtype)


def _low_rank_of(experts: Any) -> Mapping[str, list[LowRank]]:
    return experts.low_rank if isinstance(experts, TransformersLayout) else {}


def _operands(experts: Any, name: str, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, and the (S, in, out) matrices of parameter `name`."""
    x_ND, weight = cast_as_autocast_would(x_ND, getattr(experts, name))
    if not experts.is_transposed:  # (S, out, in) and (S, in, out) are both in use: go on with the latter
        weight = weight.transpose(1, 2)
    return x_ND.to(weight.dtype), weight


def _project(
    experts: Any, name: str, x_ND: Tensor, rows_per_slot: Int[Tensor, " S"], low_rank: list[LowRank]
) -> Tensor:
    """(N, out): each row times its slot's matrix plus low-rank update, and its bias."""
    if _is_fetched(experts, name):
        rows = experts.packed[name] if is_packed(experts, name) else getattr(experts, name)
        x_ND, like = cast_as_autocast_would(x_ND, x_ND.new_empty(0, dtype=rows.dtype))
        x_ND = x_ND.to(like.dtype)
        out = FrozenProduct.apply(x_ND, rows_per_slot, experts, name)
    else:
        x_ND, weight = _operands(experts, name, x_ND)
        out = grouped_mm(x_ND, weight, rows_per_slot)
    for a_SRI, b_SOR, scaling in low_rank:
        inner_NR = grouped_mm(x_ND, a_SRI.to(x_ND.dtype).transpose(1, 2), rows_per_slot) * scaling
        out = out + grouped_mm(inner_NR, b_SOR.to(x_ND.dtype).transpose(1, 2), rows_per_slot)
    if experts.has_bias:
        out = out + getattr(experts, f"{name}_bias")[slots_of_rows(rows_per_slot, len(x_ND)).squeeze(1)]
    return out


def _is_fetched(experts: nn.Module, name: str) -> bool:
    """Whether a frozen parameter is unpacked, or copied to the device, when it is used."""
    return is_packed(experts, name) or is_on_host(experts, name)


class FrozenProduct(torch.autograd.Function):
    """Rows times the matrices of frozen experts, which are fetched and unpacked in the forward pass, and again in the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"], module: Any, name: str
    ) -> Float[Tensor, "N F"]:
        """(N, F): each row times its slot's matrix."""
        ctx.save_for_backward(rows_per_slot)
        ctx.module, ctx.name = module, name
        return _frozen_product(rows_ND, rows_per_slot, module, name, by_rows=module.is_transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of the rows only."""
        (rows_per_slot,) = ctx.saved_tensors
        module, name = ctx.module, ctx.name
        grad = _frozen_product(grads[0].contiguous(), rows_per_slot, module, name, by_rows=not module.is_transposed)
        return grad, None, None, None


def _frozen_product(x: Tensor, rows_per_slot: Int[Tensor, " S"], module: Any, name: str, *, by_rows: bool) -> Tensor:
    """Rows of `x` times their slot's matrix (A, B), or its transpose without `by_rows`. Packed matrices are unpacked in
    parts of their rows."""

    def product(columns: Tensor, rows_SAB: Tensor) -> Tensor:
        rows_SAB = rows_SAB.to(x.dtype)
        return grouped_mm(columns, rows_SAB if by_rows else rows_SAB.transpose(1, 2), rows_per_slot)

    if not is_packed(module, name):
        return product(x, rows_on(module, name, x.device))
    parts = parts_of_rows(module, name, MOST_UNPACKED)
    if not by_rows:
        return torch.cat([product(x, unpacked(module, name, x.device, part)) for part in parts], 1)
    y = product(x[:, parts[0]], unpacked(module, name, x.device, parts[0]))
    for part in parts[1:]:
        y += product(x[:, part], unpacked(module, name, x.device, part))
    return y


def _is_plain(experts: Any) -> bool:
    """Whether the experts compute `down(silu(gate(x)) * up(x))` with the gate's rows before `up`'s."""
    from transformers.activations import SiLUActivation

    return (
        isinstance(getattr(experts, "act_fn", None), (nn.SiLU, SiLUActivation))
        and experts.is_concatenated
        and getattr(experts, "has_gate", True)
        and not getattr(experts, "has_post_expert_norm", False)
        and not experts.has_bias
        and has_default_gate(experts)
    )
