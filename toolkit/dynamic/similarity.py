"""How similar two experts are: by their outputs on the same tokens, and by their weights after alignment.

An expert is a sum over hidden units, so a permutation of its units changes its weights and not its function. Units are
matched before weights are compared or averaged ("Git Re-Basin", Ainsworth et al. 2022, arXiv 2209.04836, section 3.2),
by the assignment with the highest total similarity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.dynamic.expert_rows import ExpertRows
from toolkit.dynamic.plans import Pair
from toolkit.dynamic.roster import ExpertRecord
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.parallel.collectives import sum_over_ranks

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Rows = Mapping[str, Tensor]
"""One expert's rows of the stacked parameters, by name: `up` (F or 2F, D) and `down` (F, D)."""


def units(rows: Rows) -> Float[Tensor, "F P"]:
    """Returns (F, P), the weights of each hidden unit, concatenated: its rows of `up` (with swiglu the gate's too) and
    `down`.

    Input and output weights of a unit are scaled to equal norms, as relu(c x) / c = relu(x).
    """
    down = rows["down"]
    up = torch.cat(rows["up"].chunk(len(rows["up"]) // len(down)), dim=1)
    up_norm = up.norm(dim=1, keepdim=True)
    down_norm = down.norm(dim=1, keepdim=True)
    norm = (up_norm * down_norm).sqrt()
    return torch.cat([up * (norm / up_norm.clamp(min=1e-12)), down * (norm / down_norm.clamp(min=1e-12))], dim=1)


def alignment(rows: Rows, other: Rows) -> Int[Tensor, " F"]:
    """Returns int64 (F), `other`'s unit for each unit of `rows`."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and only runs that compare experts need it

    similarity_FF = units(rows) @ units(other).T
    _, matched = linear_sum_assignment(similarity_FF.double().cpu().numpy(), maximize=True)
    return torch.from_numpy(matched)


def reordered(rows: Rows, order_F: Int[Tensor, " F"]) -> dict[str, Tensor]:
    """Returns the same expert with its units in the order of `order_F`; works on optimizer states alike."""
    hidden = len(order_F)
    return {
        name: torch.cat([part[order_F.to(part.device)] for part in value.split(hidden)]) for name, value in rows.items()
    }


def weight_similarity(rows: Rows, other: Rows) -> float:
    """Returns the cosine of two experts' weights after alignment: 1 for the same function, about 0 for independent
    experts."""
    mine = units(rows)
    theirs = units(other)[alignment(rows, other)]
    return float((mine * theirs).sum() / (mine.norm() * theirs.norm()).clamp(min=1e-12))


@torch.no_grad()
def output_distances(layer: MoE, x_TD: Float[Tensor, "T D"], logical_ids: Sequence[int]) -> Float[Tensor, "L L"]:
    """Returns float64 (L, L), the normalised distance of the outputs of experts `logical_ids` on all ranks' tokens. A
    collective.

    |f - g| / sqrt(|f|^2 + |g|^2), with norms over tokens: 0 for equal outputs, 1 for orthogonal ones.
    """
    dispatcher, outputs = layer.expert_stack.dispatcher, []
    for logical_id in logical_ids:
        ids_T1 = torch.full((len(x_TD), 1), logical_id, device=x_TD.device)
        rows, dispatched = dispatcher.dispatch(x_TD, ids_T1, x_TD.new_ones(len(x_TD), 1))
        rows = layer.experts(rows, dispatched.rows_per_slot)
        outputs.append(dispatcher.combine(rows, dispatched).double().flatten())
    outputs_LN = torch.stack(outputs)
    products_LL = sum_over_ranks(outputs_LN @ outputs_LN.T)
    size_L = products_LL.diagonal()
    both_LL = size_L.unsqueeze(0) + size_L.unsqueeze(1)
    return ((both_LL - 2 * products_LL).clamp(min=0) / both_LL.clamp(min=1e-30)).sqrt()


def compare_experts(
    layer: MoE,
    x_TD: Tensor,
    records: Sequence[ExpertRecord],
    *,
    max_distance: float,
    keep_apart: Callable[[int, int], bool] | None = None,
) -> tuple[dict[Pair, float], dict[Pair, float]]:
    """Compares experts by their outputs, and those with similar outputs by their weights. A collective.

    Args:
        layer: The layer.
        x_TD: The tokens whose outputs are compared.
        records: The experts.
        max_distance: The largest distance of outputs up to which weights are compared.
        keep_apart: Says of two uids whether they are not to be merged, so that weights need not be compared.

    Returns:
        By uids, the distance of outputs of all pairs, and the similarity of weights of those that were compared.
    """
    distance_LL = output_distances(layer, x_TD, [record.logical_id for record in records]).tolist()
    rows = ExpertRows(layer.expert_stack, None)
    distance, similarity = {}, {}
    for a, b in combinations(range(len(records)), 2):
        pair = records[a].uid, records[b].uid
        distance[pair] = distance_LL[a][b]
        if distance[pair] <= max_distance and not (keep_apart is not None and keep_apart(*pair)):
            mine = rows.fetch(records[a].logical_id)
            other = rows.fetch(records[b].logical_id)
            similarity[pair] = weight_similarity(mine, other)
    return distance, similarity
