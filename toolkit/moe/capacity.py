"""Capacity: an expert takes so many copies and no more; the rest are dropped, sent nowhere and weigh nothing.

    capacity of each expert = ceil(factor * routed copies of all ranks / experts)

It bounds what one rank may have to compute, at the price of tokens that pass an expert by (their other experts, the
shared one and the residual stream still see them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.moe.dispatch import sort_by_slot

DropPolicy = Literal["probs", "position"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Which routed copies stay, decided over the micro-batch of all ranks, as on one process.

    Of an expert with too many copies, `probs` drops those with the lowest weights, and `position` those of the latest
    tokens, where the tokens of a rank come after those of the rank before. Ties go to the earlier token. `probs` has
    every rank see all weights, a few bytes per copy; `position` exchanges counts.
    """

    factor: float
    """1 leaves room for a balanced load; large values drop nothing."""
    policy: DropPolicy = "probs"

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"capacity factor={self.factor} must be positive")

    @torch.no_grad()
    def kept(self, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Tensor:
        """(T, K) bool. A collective where there are several ranks."""
        if self.policy == "position":
            place_TK, load_E = place_within_expert(expert_ids_TK, num_experts)
            load_RE, rank = _gather(load_E)
            place_TK = place_TK + load_RE[:rank].sum(0)[expert_ids_TK]
            return place_TK < self._limit(load_RE.sum(0))
        copies = expert_ids_TK.numel()
        ids_N, weights_N, first = _concatenate(expert_ids_TK.flatten(), weights_TK.flatten(), num_experts)
        by_weight_N = weights_N.argsort(descending=True, stable=True)
        place_N1, load_E = place_within_expert(ids_N[by_weight_N].unsqueeze(1), num_experts + 1)
        kept_N = torch.empty_like(ids_N, dtype=torch.bool)
        kept_N[by_weight_N] = place_N1[:, 0] < self._limit(load_E[:num_experts])
        return kept_N[first : first + copies].view(expert_ids_TK.shape)

    def _limit(self, load_E: Tensor) -> Tensor:
        return (self.factor * load_E.sum().double() / len(load_E)).ceil()


def place_within_expert(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(T, K): how many earlier copies go to the same expert; and (E), how many go there in all."""
    order = sort_by_slot(expert_ids_TK, num_experts)
    first_E = order.rows_per_slot.cumsum(0) - order.rows_per_slot
    return order.place_TK - first_E[expert_ids_TK], order.rows_per_slot


def _gather(values: Tensor) -> tuple[Tensor, int]:
    """The `values` of all ranks, stacked, and which are this rank's."""
    if not dist.is_initialized():
        return values.unsqueeze(0), 0
    gathered = values.new_empty(dist.get_world_size(), *values.shape)
    dist.all_gather(list(gathered), values.contiguous())
    return gathered, dist.get_rank()


def _concatenate(ids_N: Tensor, weights_N: Tensor, no_expert: int) -> tuple[Tensor, Tensor, int]:
    """All ranks' copies in the order of ranks, filled up with copies for `no_expert`, and where this rank's begin.

    Waits for the device: ranks have different numbers of copies, and a gather wants to know the largest.
    """
    if not dist.is_initialized():
        return ids_N, weights_N, 0
    longest = torch.tensor(len(ids_N), device=ids_N.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    missing = int(longest) - len(ids_N)
    ids_RN, rank = _gather(torch.nn.functional.pad(ids_N, (0, missing), value=no_expert))
    weights_RN, _ = _gather(torch.nn.functional.pad(weights_N, (0, missing)))
    return ids_RN.flatten(), weights_RN.flatten(), rank * int(longest)
