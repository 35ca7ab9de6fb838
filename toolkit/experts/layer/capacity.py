"""Expert capacity: assignments beyond it are dropped, that is not sent, and their weight is 0.

    capacity of each expert = ceil(factor * assignments of all ranks / experts)

It bounds the rows that a rank computes. A token whose assignment is dropped still passes through its other experts, the
shared expert and the residual connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import UserError
from toolkit.experts.layer.rows import place_within_slot

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

DropPolicy = Literal["probs", "position"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Decides which assignments are kept, over the micro-batches of all ranks together, so as one process would.

    Beyond an expert's capacity, `probs` drops the assignments with the lowest weights, and `position` those of the last
    tokens, in the order of ranks and then of tokens. Of equal weights the earlier token's is kept. `probs` gathers all
    weights on every rank (a few bytes per assignment), `position` only counts. Raises UserError for a factor of 0 or
    less.
    """

    factor: float
    """1 is the capacity of a balanced load; large values drop nothing."""
    policy: DropPolicy = "probs"

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise UserError(f"capacity_factor={self.factor}: take a number above 0, or None to drop nothing.")

    @torch.no_grad()
    def kept(
        self, expert_ids_TK: Int[Tensor, "T K"], weights_TK: Float[Tensor, "T K"], num_experts: int
    ) -> Bool[Tensor, "T K"]:
        """(T, K) bool. A collective where there are several ranks."""
        if self.policy == "position":
            place_TK, load_E = place_within_slot(expert_ids_TK, num_experts)
            load_RE, rank = _gather(load_E)
            place_TK = place_TK + load_RE[:rank].sum(0)[expert_ids_TK]
            return place_TK < self._limit(load_RE.sum(0))
        assignments = expert_ids_TK.numel()
        ids_N, weights_N, first = _concatenate(expert_ids_TK.flatten(), weights_TK.flatten(), num_experts)
        by_weight_N = weights_N.argsort(descending=True, stable=True)
        place_N1, load_E = place_within_slot(ids_N[by_weight_N].unsqueeze(1), num_experts + 1)
        kept_N = torch.empty_like(ids_N, dtype=torch.bool)
        kept_N[by_weight_N] = place_N1[:, 0] < self._limit(load_E[:num_experts])
        return kept_N[first : first + assignments].view(expert_ids_TK.shape)

    def _limit(self, load_E: Int[Tensor, " E"]) -> Tensor:
        return (self.factor * load_E.sum().double() / len(load_E)).ceil()


def _gather(values: Tensor) -> tuple[Tensor, int]:
    """The `values` of all ranks, stacked, and the index of this rank's."""
    if not dist.is_initialized():
        return values.unsqueeze(0), 0
    gathered = values.new_empty(dist.get_world_size(), *values.shape)
    dist.all_gather(list(gathered), values.contiguous())
    return gathered, dist.get_rank()


def _concatenate(
    ids_N: Int[Tensor, " N"], weights_N: Float[Tensor, " N"], no_expert: int
) -> tuple[Tensor, Tensor, int]:
    """All ranks' assignments in the order of ranks, padded with `no_expert`, and the index of this rank's first.

    A host sync: ranks have different numbers of assignments, and are padded to the largest.
    """
    if not dist.is_initialized():
        return ids_N, weights_N, 0
    most = torch.tensor(len(ids_N)).to(ids_N.device, non_blocking=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    longest = int(most)
    missing = longest - len(ids_N)
    ids_RN, rank = _gather(torch.nn.functional.pad(ids_N, (0, missing), value=no_expert))
    weights_RN, _ = _gather(torch.nn.functional.pad(weights_N, (0, missing)))
    return ids_RN.flatten(), weights_RN.flatten(), rank * longest
