"""Balance and traffic metrics of a window of steps, the same from live counts and from recorded traces.

Letters: `F` training forwards (micro-batches), `L` layers, `W` ranks of the world, ordered by EP group, so that each
`R` consecutive ones are one, `S` source ranks that were counted, `E` experts. Imbalance is taken per forward and layer,
because ranks wait for each other there; means over layers are taken last. E is the largest number of experts of any
layer; others have zeros after theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.layer.routing_log import RowBytes
from toolkit.experts.placement.loads import Floats, Ints, expert_imbalance, max_over_mean, rank_imbalance
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.traffic import Traffic, hierarchical_rows, rows_between_ranks

PER_FORWARD = {"received_FLW", "imbalance_FL"}


@dataclass(frozen=True)
class _Sums:
    """Counts of forward passes. Fields are arrays: sums over forward passes, except for the fields in `PER_FORWARD`."""

    load_LE: Ints
    """Assignments per expert, over all forwards, dropped ones included."""
    dropped_LE: Ints
    """Assignments that a capacity dropped."""
    sent_LWR: Ints
    """Assignments of each rank to each rank of its EP group, over all forwards."""
    visits_LWR: Ints
    """Rows that they send for these: one for each token and rank that has experts of it; 0 if they were not counted."""
    crossings_LWR: Ints
    """Distinct tokens from each rank to each other node, numbered within the EP group, of which there are at most as
    many as ranks; over all forwards; 0 if they were not counted."""

    def then(self, later: Self) -> Self:
        """Return these forward passes and `later` ones."""
        after = vars(later)
        return type(self)(
            **{
                name: np.concatenate([part, after[name]]) if name in PER_FORWARD else part + after[name]
                for name, part in vars(self).items()
            }
        )


@dataclass(frozen=True)
class DispatchCounts(_Sums):
    """Rows sent by some source ranks. Counts of different sources in the same forward passes add up element-wise."""

    received_FLW: Ints
    """Rows from these sources that each rank's experts compute."""

    def flat(self) -> Ints:
        """Return all numbers in one array, for one reduction over ranks."""
        return np.concatenate([part.ravel() for part in vars(self).values()])

    def unflat(self, numbers: Ints) -> DispatchCounts:
        """Return the inverse of `flat`, for counts of the same shapes."""
        ends = np.cumsum([part.size for part in vars(self).values()])[:-1]
        pieces = zip(np.split(numbers, ends), vars(self).values(), strict=True)
        return DispatchCounts(*[piece.reshape(part.shape) for piece, part in pieces])


def count(
    sent_FLSE: NDArray[Any],
    placements: Sequence[ExpertPlacement],
    *,
    sources: Sequence[int],
    world_size: int,
    dropped_LE: NDArray[Any] | int = 0,
    visits_LSR: NDArray[Any] | int = 0,
    crossings_LSR: NDArray[Any] | int = 0,
) -> DispatchCounts:
    """Count the rows that some ranks sent in forward passes under one placement per layer.

    Args:
        sent_FLSE: Rows from each source rank to each expert.
        placements: Placement of each layer.
        sources: Ranks of S, in the order of EP groups.
        world_size: Number of all ranks.
        dropped_LE: Pairs that a capacity dropped.
        visits_LSR: Tokens of each source that have experts on each rank. 0: not counted.
        crossings_LSR: Tokens of each source that have experts on each other node
            (`toolkit.experts.layer.stack.crossings`). 0: not counted. Neither can be derived from loads, which do
            not contain the experts of single tokens.
    """
    forwards, layers, _, experts = sent_FLSE.shape
    group = placements[0].ranks
    all_dropped_LE = np.zeros((layers, experts), dtype=np.int64) + dropped_LE
    received_FLW = np.zeros((forwards, layers, world_size), dtype=np.int64)
    sent_LWR = np.zeros((layers, world_size, group), dtype=np.int64)
    visits_LWR, crossings_LWR = np.zeros_like(sent_LWR), np.zeros_like(sent_LWR)
    visits_LWR[:, list(sources)] = visits_LSR
    crossings_LWR[:, list(sources)] = crossings_LSR
    for layer, placement in enumerate(placements):
        rows_FSR = rows_between_ranks(
            sent_FLSE[:, layer, :, : placement.num_experts], placement, sources=[s % group for s in sources]
        )
        sent_LWR[layer, list(sources)] = rows_FSR.sum(0)
        for index, source in enumerate(sources):
            first = source // group * group
            received_FLW[:, layer, first : first + group] += rows_FSR[:, index]
    load_LE = sent_FLSE.sum((0, 2), dtype=np.int64) + dropped_LE
    return DispatchCounts(load_LE, all_dropped_LE, sent_LWR, visits_LWR, crossings_LWR, received_FLW)


@dataclass(frozen=True)
class Window(_Sums):
    """Sums over all ranks in a window of steps. Consecutive windows add up with `then`."""

    imbalance_FL: Floats
    """Maximum over mean of the rows per rank of the world; 0 for a layer without rows."""

    @classmethod
    def of(cls, counts: DispatchCounts) -> Window:
        """Return the window of `counts` that are summed over all ranks."""
        imbalance_FL = max_over_mean(counts.received_FLW) * counts.received_FLW.any(-1)
        traffic = counts.sent_LWR, counts.visits_LWR, counts.crossings_LWR
        return cls(counts.load_LE, counts.dropped_LE, *traffic, imbalance_FL)

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON values."""
        return {name: part.tolist() for name, part in vars(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any], like: Window) -> Window:
        """Return the inverse of `to_dict`. Traffic between another number of ranks than in `like` is left out."""
        parts = {name: np.array(data.get(name, part), dtype=part.dtype) for name, part in vars(like).items()}
        parts["imbalance_FL"] = parts["imbalance_FL"].reshape(-1, like.imbalance_FL.shape[1])
        if parts["sent_LWR"].shape != like.sent_LWR.shape:
            parts |= {name: vars(like)[name] for name in ("sent_LWR", "visits_LWR", "crossings_LWR")}
        return cls(**parts)


def expert_metrics(loads: Sequence[NDArray[Any]]) -> dict[str, float]:
    """Return the balance over experts, whatever their placement, given each layer's load (E) of its active experts,
    not all 0."""
    over_mean = [load_E / load_E.mean() for load_E in loads]
    each = [expert_imbalance(load_E) for load_E in loads]
    return {
        "moe/max_load_over_mean": float(max(load_E.max() for load_E in over_mean)),
        "moe/min_load_over_mean": float(min(load_E.min() for load_E in over_mean)),
        "moe/max_violation": float(np.mean([layer.max_violation for layer in each])),
        "moe/load_variation": float(np.mean([layer.variation for layer in each])),
        "moe/load_entropy": float(np.mean([layer.entropy for layer in each])),
        "moe/dead_experts": sum(int((load_E < min(0.01 * len(load_E), 0.1)).sum()) for load_E in over_mean),
    }


def balance_metrics(window: Window, placements: Sequence[ExpertPlacement]) -> dict[str, float]:
    """Return the balance over ranks under `placements`."""
    # Without forwards that a layer was not called in.
    imbalance_FL = np.where(window.imbalance_FL > 0, window.imbalance_FL, np.nan)
    imbalance_FL = imbalance_FL.compress(window.imbalance_FL.any(1), 0).compress(window.imbalance_FL.any(0), 1)
    of_forward_F = np.nanmean(imbalance_FL, 1)
    pairs = [(load_E[: place.num_experts], place) for load_E, place in zip(window.load_LE, placements, strict=True)]
    pairs = [(load_E, place) for load_E, place in pairs if load_E.any()]
    return {
        "moe/rank_imbalance": float(of_forward_F.mean()),
        "moe/rank_imbalance_median": float(np.median(of_forward_F)),
        "moe/rank_imbalance_p95": float(np.percentile(of_forward_F, 95)),
        "moe/rank_imbalance_worst_layer": float(np.nanmean(imbalance_FL, 0).max()),
        "moe/rank_balancedness": float(np.nanmean(1 / imbalance_FL)),
        "moe/rank_imbalance_of_sum": float(np.mean([rank_imbalance(load, place) for load, place in pairs])),
    }


def rank_loads(window: Window) -> Ints:
    """Return the rows that each rank's experts computed in each layer, shape (L, W)."""
    layers, world, group = window.sent_LWR.shape
    return window.sent_LWR.reshape(layers, world // group, group, group).sum(2).reshape(layers, world)


def traffic_metrics(
    window: Window,
    row_bytes: Sequence[RowBytes],
    *,
    steps: int,
    node_of_rank: Sequence[int],
    hierarchical: bool = False,
) -> dict[str, float]:
    """Return the bytes that dispatch and combine sent, forward and backward, excluding recomputation.

    Args:
        window: The sums over all ranks, with visits; also with crossings if the exchange is `hierarchical`.
        row_bytes: The bytes of a row, per layer.
        steps: The optimizer steps of the window.
        node_of_rank: The node of each rank, in the order of EP groups.
        hierarchical: Whether a row was sent once to each node, and from there to ranks.
    """
    world, group = window.sent_LWR.shape[1:]
    sent_W = np.zeros(world, dtype=np.int64)
    home = between = 0
    crossed = 0.0
    rows = 0
    for layer, size in enumerate(row_bytes):
        for first in range(0, world, group):
            ranks = slice(first, first + group)
            assignments, part = Traffic(window.sent_LWR[layer, ranks]), Traffic(window.visits_LWR[layer, ranks])
            nodes = node_of_rank[ranks]
            exchanges = [part]
            if hierarchical:
                crossings_PG = window.crossings_LWR[layer, ranks, : len(set(nodes))]
                exchanges = [Traffic(rows_PP) for rows_PP in hierarchical_rows(part.rows_PP, crossings_PG)]
            for exchange in exchanges:
                sent_W[ranks] += exchange.bytes_trained(size.dispatched, size.combined)
                between += exchange.cross_node_rows(nodes) * 2 * (size.dispatched + size.combined)
            home += int(part.rows_PP.trace()) * 2 * (size.dispatched + size.combined)
            in_group = int(assignments.rows_PP.sum())
            rows += in_group
            crossed += assignments.cross_node_fraction(nodes) * in_group
    return {
        "moe/all_to_all_bytes_per_step": float(sent_W.sum()) / steps,
        "moe/all_to_all_bytes_per_step_busiest_rank": float(sent_W.max()) / steps,
        "moe/cross_node_bytes_per_step": between / steps,
        "moe/local_bytes_per_step": home / steps,
        "moe/cross_node_fraction": crossed / rows if rows else 0.0,
    }


def deduplicated_metrics(window: Window) -> dict[str, float]:
    """Return `moe/cross_node_fraction` as it would be if a token were sent to each node once, however many of its
    experts are there. Live only: traces do not have crossings."""
    rows = int(window.sent_LWR.sum())
    return {"moe/cross_node_fraction_deduplicated": int(window.crossings_LWR.sum()) / rows if rows else 0.0}


def replica_metrics(placements: Sequence[ExpertPlacement], weight_bytes: Sequence[int]) -> dict[str, float]:
    """Return the cost of replicas beyond the first in one EP group, given bytes of one expert per layer: memory of
    weights and gradients; and traffic of a step, gradients to the owner and weights back."""
    extra = [sum(len(place.replicas(e)) - 1 for e in range(place.num_experts)) for place in placements]
    total = sum(replicas * size for replicas, size in zip(extra, weight_bytes, strict=True))
    return {
        "moe/replicas": sum(extra),
        "moe/replica_memory_bytes": 2 * total,
        "moe/replica_bytes_per_step": 2 * total,
    }
