"""Planners that lower traffic while the imbalance stays within a tolerance of that of `lpt`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.loads import Floats, Load, checked_load
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.placement.planners.packing import LITTLE_GAIN, PackingState, pack, settle
from toolkit.experts.placement.planners.registry import register_planner
from toolkit.experts.placement.planners.simple import lpt

Matrix = NDArray[Any] | Sequence[Sequence[float]]


@register_planner("affinity")
def affinity(
    load_E: Load, current: ExpertPlacement, *, together_EE: Matrix, tolerance: float = 0.05
) -> ExpertPlacement:
    """Puts experts that are often chosen together on one rank, so that a token is sent to fewer ranks.

    Plans from scratch, without replicas. At least as many pairs share a rank as with `lpt`, or with a `current` within
    the tolerance.

    Args:
        load_E: The load of each expert.
        current: The placement now.
        together_EE: How many tokens chose both of two experts.
        tolerance: The imbalance is at most (1 + `tolerance`) times that of `lpt`.

    Raises:
        ValueError: If `together_EE` is not symmetric, or of another shape.
    """
    load = checked_load(load_E, current)
    together = np.array(together_EE, dtype=np.float64)
    if together.shape != (len(load), len(load)) or not np.array_equal(together, together.T):
        raise ValueError(f"together_EE must be symmetric, with a row for each of {len(load)} experts")
    np.fill_diagonal(together, 0.0)
    best = PackingState(lpt(load, current), load)
    limit = (1 + tolerance) * best.imbalance
    grown = PackingState(settle(_grow(load, together, current, limit * load.sum() / current.ranks), current), load)
    grown.level(target=limit)
    return _choose([best, grown, _kept(current, load)], limit, lambda packing: _pairs_on_one_rank(packing, together))


def _grow(load: Floats, together: Floats, current: ExpertPlacement, limit: float) -> list[list[int]]:
    """Gives, heaviest first, each expert to the rank whose experts it is chosen together with most, beyond chance."""
    of_each = together.sum(1)
    surplus = together - np.outer(of_each, of_each) / max(float(of_each.sum()), 1e-300)
    room = np.array(current.slots_per_rank)
    load_R = np.zeros(len(room))
    pull_ER = np.zeros((len(load), len(room)))  # so that an expert's row is in one piece
    experts_R: list[list[int]] = [[] for _ in room]
    for expert in np.argsort(-load, kind="stable").tolist():
        pull_R = np.where((room > 0) & (load_R + load[expert] <= limit), pull_ER[expert], -np.inf)
        rank = int(pull_R.argmax())
        if pull_R[rank] == -np.inf:
            rank = int(np.where(room > 0, load_R, np.inf).argmin())
        experts_R[rank].append(expert)
        room[rank] -= 1
        load_R[rank] += load[expert]
        pull_ER[:, rank] += surplus[expert]
    return experts_R


def _pairs_on_one_rank(packing: PackingState, together: Floats) -> float:
    """Returns how many co-activations are of two experts on one rank; for placements without replicas."""
    held = packing.expert_G != EMPTY_ROW
    rank_E = np.empty(len(together), dtype=np.int64)
    rank_E[packing.expert_G[held]] = packing.rank_G[held]
    return float(together[rank_E[:, None] == rank_E].sum()) / 2


@register_planner("node_aware")
def node_aware(
    load_E: Load,
    current: ExpertPlacement,
    *,
    node_of_rank: Sequence[int],
    source_load_RE: Matrix,
    tolerance: float = 0.05,
) -> ExpertPlacement:
    """Puts experts on the node that sends them most tokens, so that fewer tokens cross nodes.

    Plans from scratch, without replicas. No more tokens cross nodes than with `lpt`, or with a `current` within the
    tolerance.

    Args:
        load_E: The load of each expert.
        current: The placement now.
        node_of_rank: The node of each rank.
        source_load_RE: The assignments of each rank to each expert.
        tolerance: The imbalance is at most (1 + `tolerance`) times that of `lpt`.

    Raises:
        ValueError: If `node_of_rank` or `source_load_RE` are not of the placement's ranks.
    """
    load = checked_load(load_E, current)
    source_load = np.asarray(source_load_RE, dtype=np.float64)
    if len(node_of_rank) != current.ranks:
        raise ValueError(f"node_of_rank names {len(node_of_rank)} rank(s), the placement has {current.ranks}")
    if source_load.shape != (current.ranks, len(load)):
        raise ValueError(f"source_load_RE has shape {source_load.shape}, not {(current.ranks, len(load))}")
    node_R = np.unique(np.asarray(node_of_rank), return_inverse=True)[1]
    ends = np.bincount(node_R).cumsum().tolist()
    by_node = source_load if (np.diff(node_R) >= 0).all() else source_load[node_R.argsort(kind="stable")]
    sent_NE = np.stack([by_node[first:end].sum(0) for first, end in pairwise([0, *ends])])
    best = PackingState(lpt(load, current), load)
    limit = (1 + tolerance) * best.imbalance
    near = PackingState(settle(_near_senders(load, sent_NE, node_R, current, limit), current), load)
    near.level(min_gain=LITTLE_GAIN, node_of_rank=node_R)
    near.level(target=limit)

    def stays(packing: PackingState) -> float:
        held = packing.expert_G != EMPTY_ROW
        return float(sent_NE[node_R[packing.rank_G[held]], packing.expert_G[held]].sum())

    return _choose([best, near, _kept(current, load)], limit, stays)


def _near_senders(
    load: Floats, sent_NE: Floats, node_R: NDArray[np.int64], current: ExpertPlacement, limit: float
) -> list[list[int]]:
    """Experts whose node matters most first, each to the node that sends it most and has room; packed within nodes."""
    nodes = len(sent_NE)
    room = np.bincount(node_R, current.slots_per_rank, nodes).astype(np.int64)
    limit_N = limit * load.sum() / current.ranks * np.bincount(node_R, minlength=nodes)
    load_N = np.zeros(nodes)
    experts_N: list[list[int]] = [[] for _ in range(nodes)]
    to_lose = sent_NE.max(0) - sent_NE.mean(0)
    sent_EN = np.ascontiguousarray(sent_NE.T)
    for expert in np.argsort(-to_lose, kind="stable").tolist():
        fits = (room > 0) & (load_N + load[expert] <= limit_N)
        if fits.any():
            node = int(np.where(fits, sent_EN[expert], -np.inf).argmax())
        else:
            node = int(np.where(room > 0, load_N, np.inf).argmin())
        experts_N[node].append(expert)
        room[node] -= 1
        load_N[node] += load[expert]
    experts_R: list[list[int]] = [[] for _ in node_R]
    ranks_N: list[list[int]] = [[] for _ in range(nodes)]
    for rank, node in enumerate(node_R.tolist()):
        ranks_N[node].append(rank)
    for experts, ranks in zip(experts_N, ranks_N, strict=True):
        packed = pack([float(load[e]) for e in experts], [len(current.slots[rank]) for rank in ranks])
        for rank, items in zip(ranks, packed, strict=True):
            experts_R[rank] = [experts[item] for item in items]
    return experts_R


def _kept(current: ExpertPlacement, load: Floats) -> PackingState | None:
    """`current`, or None where it has replicas, because these planners place none."""
    return None if current.has_replicas else PackingState(current, load)


def _choose(
    packings: Sequence[PackingState | None], limit: float, score: Callable[[PackingState], float]
) -> ExpertPlacement:
    """The packing with the highest score within the limit; of equals the last one, because `current` moves nothing."""
    fitting = [packing for packing in packings if packing is not None and packing.imbalance <= limit * (1 + 1e-9)]
    return max(reversed(fitting), key=score).placement()
