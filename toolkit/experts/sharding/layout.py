"""How experts modules are called: a class for each layout, mixed into the class of the module, as FSDP2 does.

Names, parameters, hooks, `isinstance` and copies of the module stay. A layout computes rows in order of slots, each of
one expert with weight 1, as a dispatcher delivers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.experts.layer.recompute import decide
from toolkit.experts.layer.rows import Pairs, sort_by_slot

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from toolkit.experts.layer.rows_in_files import RowsInFiles


class LowRank(NamedTuple):
    """Low-rank update of one stacked parameter of experts: `scaling * B @ A`, slot by slot."""

    a_SRI: Float[Tensor, "S R I"]
    b_SOR: Float[Tensor, "S O R"]
    scaling: float


class Layout(nn.Module):
    """An experts module that computes rows in order of slots."""

    num_experts: int
    """Over all ranks."""
    rows_in_files: RowsInFiles = "stacked"
    computed_on: Mapping[str, torch.device] = MappingProxyType({})
    """Name -> device of the computation, of parameters that stay in the host's memory."""

    def compute_slots(self, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
        """Return the outputs of the experts for rows in order of slots."""
        raise NotImplementedError

    def compute_pairs(self, x_RD: Float[Tensor, "R D"], pairs: Pairs) -> Float[Tensor, "R D"]:
        """Return the weighted sum of the experts' outputs for each row."""
        return pairs.unpermute(self.compute_slots(pairs.permute(x_RD), pairs.order.rows_per_slot))

    def forward_of_slots(self, slots: int, *args: Tensor) -> Any:
        """Call the forward of the module's own class. Only meanwhile is `num_experts` the number of its rows."""
        experts, self.num_experts = self.num_experts, slots
        try:
            return super().forward(*args)
        finally:
            self.num_experts = experts


class CalledByIds(Layout):
    """The forward of the own class takes (hidden (T, D), expert ids (T, K), weights (T, K)), or weights before ids."""

    weights_first = False

    def compute_slots(self, rows_ND: Tensor, rows_per_slot: Tensor) -> Tensor:
        slot_N1, one_N1 = slots_of_rows(rows_per_slot, len(rows_ND)), rows_ND.new_ones(len(rows_ND), 1)
        chosen = (one_N1, slot_N1) if self.weights_first else (slot_N1, one_N1)
        return self.forward_of_slots(len(rows_per_slot), rows_ND, *chosen)


class SortsRows(Layout):
    """The forward of the own class takes something else; this one sorts rows for `compute`."""

    def forward(
        self, hidden: Float[Tensor, "T D"], expert_ids: Int[Tensor, "T K"], weights: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        """Return the weighted sum of each token's expert outputs, shape (T, D)."""
        return self.compute_pairs(hidden, pairs_of(expert_ids, weights, self.num_experts))


def pairs_of(ids_TK: Int[Tensor, "T K"], weights_TK: Float[Tensor, "T K"], num_experts: int) -> Pairs:
    """Return the pairs of tokens whose experts are all on this rank, in order of experts."""
    ids_TK = decide(lambda: ids_TK)  # a recomputation could choose other experts
    return Pairs(sort_by_slot(ids_TK, num_experts, ids_TK.numel()), weights_TK)


def slots_of_rows(rows_per_slot: Int[Tensor, " S"], num_rows: int) -> Int[Tensor, "N 1"]:
    """Return the slot of each of `num_rows` rows in order of slots, int64, as expert ids (N, 1) of a top-1 router."""
    slots = torch.arange(len(rows_per_slot), device=rows_per_slot.device)
    return slots.repeat_interleave(rows_per_slot, output_size=num_rows).unsqueeze(1)


# --- the class of a module -------------------------------------------------------------------------------------------


def extend(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Mix `mixin` into the class of `module`."""
    module.__class__ = extended(type(module), mixin)


_extended: dict[tuple[type[nn.Module], type[nn.Module]], Any] = {}


def extended(own: type[nn.Module], mixin: type[nn.Module]) -> Any:
    """Return the class `own` with `mixin` before it. It is named by the `mixin` if that is a kind of experts."""
    prefix = mixin.__name__.removesuffix("Experts") if mixin.__name__.endswith("Experts") else ""
    if (own, mixin) not in _extended:
        names = {"__reduce_ex__": _reduce_extended}
        _extended[own, mixin] = type(f"{prefix}{own.__name__}", (mixin, own), names)
    return _extended[own, mixin]


def _reduce_extended(module: nn.Module, _: int) -> tuple[Any, ...]:
    """Copy and pickle by the two classes, because the mixed one has no name in a file."""
    mixin, own = type(module).__bases__
    return _make_extended, (own, mixin), module.__getstate__()


def _make_extended(own: type[nn.Module], mixin: type[nn.Module]) -> nn.Module:
    module: nn.Module = object.__new__(extended(own, mixin))
    return module
