"""Expert capacity: pairs beyond it are dropped, that is not sent, and their weight is 0.

    capacity of each expert = ceil(factor * pairs of all ranks / experts)

It bounds the rows that a rank computes. A token whose pair is dropped still passes through its other experts, the
shared expert and the residual connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from toolkit.experts.layer.rows import place_within_slot
from toolkit.experts.parallel.collectives import world_size

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@torch.no_grad()
def within_capacity(
    expert_ids_TK: Int[Tensor, "T K"], weights_TK: Float[Tensor, "T K"], num_experts: int, factor: float
) -> Bool[Tensor, "T K"]:
    """Return whether each pair is kept: beyond an expert's capacity, the pairs with the lowest weights are dropped.

    A collective. All ranks together keep what one process would; of equal weights the earlier token's is kept. The
    weights of all ranks are gathered, a few bytes per pair.

    Args:
        expert_ids_TK: Experts of the tokens of this rank, int64, shape (T, K).
        weights_TK: Routing weights, shape (T, K).
        num_experts: Logical experts.
        factor: Capacity over the mean load. Large values drop nothing.
    """
    ids_N, weights_N, first = _pairs_of_ranks(expert_ids_TK.flatten(), weights_TK.flatten(), num_experts)
    by_weight_N = weights_N.argsort(descending=True, stable=True)
    place_N1, load_E = place_within_slot(ids_N[by_weight_N].unsqueeze(1), num_experts + 1)
    capacity = (factor * load_E[:num_experts].sum().double() / num_experts).ceil()
    kept_N = torch.empty_like(ids_N, dtype=torch.bool)
    kept_N[by_weight_N] = place_N1[:, 0] < capacity
    return kept_N[first : first + expert_ids_TK.numel()].view(expert_ids_TK.shape)


def _pairs_of_ranks(
    ids_N: Int[Tensor, " N"], weights_N: Float[Tensor, " N"], no_expert: int
) -> tuple[Tensor, Tensor, int]:
    """Return the pairs of all ranks in the order of ranks, padded with `no_expert`, and the index of this rank's first.

    A host sync: ranks have different numbers of pairs, and are padded to the largest.
    """
    if world_size() == 1:
        return ids_N, weights_N, 0
    most = torch.tensor(len(ids_N)).to(ids_N.device, non_blocking=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    longest = int(most)
    gathered = []
    for values_N, fill in ((ids_N, no_expert), (weights_N, 0)):
        padded = pad(values_N, (0, longest - len(values_N)), value=fill)
        gathered.append(padded.new_empty(dist.get_world_size(), longest))
        dist.all_gather(list(gathered[-1]), padded)
    return gathered[0].flatten(), gathered[1].flatten(), dist.get_rank() * longest
