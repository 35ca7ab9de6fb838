"""Rows and bytes between ranks: dispatch and combine under a placement, and the cost of a migration.

Letters: `E` experts, `P` ranks of an EP group (in `..._PP` the senders first), `G` nodes, `T` tokens of a rank, `K`
experts per token, `N` their pairs, `M` replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.loads import Floats, Ints
from toolkit.experts.placement.placement import ExpertPlacement, moves, owner_moves


def rows_per_slot(load_PE: NDArray[Any], placement: ExpertPlacement, *, sources: Sequence[int] | None = None) -> Ints:
    """Return int64 (..., P, global slots), the pairs of each rank for each slot, in one or several forward passes.

    A rank that has a replica of the expert uses it. Otherwise the i-th of a rank's tokens for an expert with M replicas
    goes to replica (rank + i) mod M.

    Args:
        load_PE: (..., P, E), the pairs of each rank for each expert.
        placement: The placement.
        sources: The source ranks of `load_PE`. None: all.

    Raises:
        ValueError: `load_PE` has a different shape.
    """
    load = np.asarray(load_PE, dtype=np.int64)
    source_P = np.arange(placement.ranks) if sources is None else np.asarray(sources)
    if load.shape[-2:] != (len(source_P), placement.num_experts):
        raise ValueError(f"load has shape {load.shape}, not (..., {len(source_P)}, {placement.num_experts})")
    rows = np.zeros((*load.shape[:-1], placement.ranks * placement.stride), dtype=np.int64)
    rows[..., list(placement.owner_slots)] = load
    if not placement.has_replicas:
        return rows
    for expert in range(placement.num_experts):
        places = placement.replicas(expert)
        if len(places) == 1:
            continue
        slots = [rank * placement.stride + slot for rank, slot in places]
        turn_PM = (np.arange(len(places)) - source_P[:, None]) % len(places)
        rows[..., slots] = (load[..., expert, None] + len(places) - 1 - turn_PM) // len(places)
        for (rank, _), slot in zip(places, slots, strict=True):
            for source in np.flatnonzero(source_P == rank):
                rows[..., source, slots] = 0
                rows[..., source, slot] = load[..., source, expert]
    return rows


@dataclass(frozen=True)
class Traffic:
    """Rows between ranks in one dispatch, or their pairs. Combine returns the same number of rows, and the backward
    pass repeats both."""

    rows_PP: Ints
    """Rows that each rank sends to each; the diagonal stays on its rank."""

    def bytes_trained(self, dispatched: int, combined: int) -> Ints:
        """Return (P,), sent by each rank to others in a forward and backward pass, given bytes per row of the two
        exchanges."""
        sent_and_returned_P = self.rows_PP.sum(1) + self.rows_PP.sum(0) - 2 * self.rows_PP.diagonal()
        return np.asarray(sent_and_returned_P * (dispatched + combined))

    def cross_node_rows(self, node_of_rank: Sequence[int]) -> int:
        """Return the rows that go to another node, one for each pair: two for a token with two experts on another
        node."""
        node = np.asarray(node_of_rank)
        return int(self.rows_PP[node[:, None] != node].sum())

    def cross_node_fraction(self, node_of_rank: Sequence[int]) -> float:
        """Return `cross_node_rows` as a fraction of all rows; 0 if there are none."""
        total = int(self.rows_PP.sum())
        return self.cross_node_rows(node_of_rank) / total if total else 0.0


def rows_between_ranks(
    load_PE: NDArray[Any], placement: ExpertPlacement, *, sources: Sequence[int] | None = None
) -> Ints:
    """Return int64 (..., P, P), how many of each rank's pairs go to each rank; see `rows_per_slot`."""
    rows = rows_per_slot(load_PE, placement, sources=sources)
    return rows.reshape(*rows.shape[:-1], placement.ranks, placement.stride).sum(-1)


def visits_of_choices(ids_PTK: NDArray[Any], placement: ExpertPlacement) -> Ints:
    """Return int64 (P, P), tokens of each rank that have experts on each rank, given the experts (P, T, K) of tokens
    of all ranks; negative ids are none. Replicas are chosen as in `rows_per_slot`."""
    ranks, top_k = placement.ranks, ids_PTK.shape[-1]
    rank_EM = placement.slots_of_experts().numpy() // placement.stride  # padded with -1
    replicas_E = placement.num_replicas().numpy()
    visits_PP = np.zeros((len(ids_PTK), ranks), dtype=np.int64)
    for source, ids_TK in enumerate(ids_PTK):
        id_N = ids_TK.flatten()
        turn_N = (_earlier(id_N) + source) % replicas_E[id_N]
        rank_N = np.where((rank_EM == source).any(1)[id_N], source, rank_EM[id_N, turn_N])
        visits_TP = np.zeros((len(ids_TK), ranks + 1), dtype=bool)
        np.put_along_axis(visits_TP, np.where(id_N < 0, ranks, rank_N).reshape(-1, top_k), True, axis=1)
        visits_PP[source] = visits_TP[:, :ranks].sum(0)
    return visits_PP


def _earlier(id_N: Ints) -> Ints:
    """Return (N,), how many earlier elements are the same."""
    order_N = id_N.argsort(kind="stable")
    in_order_N = id_N[order_N]
    earlier_N = np.empty_like(id_N)
    earlier_N[order_N] = np.arange(len(id_N)) - np.searchsorted(in_order_N, in_order_N)
    return earlier_N


def hierarchical_rows(visits_PP: NDArray[Any], visits_PG: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return twice (P, P), rows between nodes and inside nodes, with the hierarchical all-to-all.

    A row goes to the rank with its source's index on the other node, and from there to the ranks of its experts; rows
    that stay on a rank are on the diagonal.

    Args:
        visits_PP: (P, P), tokens of each rank that have experts on each rank, with the same number of consecutive ranks
            on each node.
        visits_PG: (P, G), tokens of each rank that have experts on each node.
    """
    ranks, nodes = visits_PG.shape
    size = ranks // nodes
    by_place = visits_PP.reshape(nodes, size, nodes, size).sum(0)
    inside = np.einsum("ibj,ab->aibj", by_place, np.eye(nodes, dtype=visits_PP.dtype))
    between = np.einsum("aib,ij->aibj", visits_PG.reshape(nodes, size, nodes), np.eye(size, dtype=visits_PG.dtype))
    return between.reshape(visits_PP.shape), inside.reshape(visits_PP.shape)


def expected_visits(rows_PP: NDArray[Any], *, top_k: int, slots: int) -> Floats:
    """Return (..., P, P), tokens of each rank that have experts on each rank.

    An estimate, because loads do not tell which experts one token chose. Exact if each of a token's choices is any of
    the slots that it has not chosen yet, all equally likely; too high if experts of one rank are chosen together.

    Args:
        rows_PP: (..., P, P), pairs of each rank for each rank.
        top_k: Experts of a token.
        slots: Slots of all ranks.
    """
    pairs_P = rows_PP.sum(-1, keepdims=True)
    share_PP = rows_PP / np.maximum(pairs_P, 1)
    none_PP = np.ones(rows_PP.shape)
    for chosen in range(top_k):
        none_PP = none_PP * np.maximum(0.0, 1 - share_PP * slots / max(slots - chosen, 1))
    tokens_P = pairs_P / top_k
    return np.asarray(np.clip(tokens_P * (1 - none_PP), rows_PP / top_k, np.minimum(rows_PP, tokens_P)))


def replica_rows(placement: ExpertPlacement) -> Ints:
    """Return int64 (P, P), of how many experts that each rank owns each rank has a replica."""
    rows_PP = np.zeros((placement.ranks, placement.ranks), dtype=np.int64)
    for expert in range(placement.num_experts):
        owner, *others = placement.replicas(expert)
        for place in others:
            rows_PP[owner.rank, place.rank] += 1
    return rows_PP


@dataclass(frozen=True)
class MigrationCost:
    """Traffic of one change of placement."""

    experts: int
    """Physical experts that leave their rank."""
    weight_bytes: int
    optimizer_bytes: int
    busiest_rank_bytes: int
    """Maximum of bytes sent and bytes received by one rank; it determines the time."""

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes


def migration_cost(
    old: ExpertPlacement, new: ExpertPlacement, *, weight_bytes: int, optimizer_bytes: int = 0
) -> MigrationCost:
    """Return the cost of going from `old` to `new`, given the bytes of a physical expert's weights and of an expert's
    optimizer state."""
    weights = [move for move in moves(old, new) if move.travels]
    states = [move for move in owner_moves(old, new) if move.travels]
    sent, received = Counter[int](), Counter[int]()
    for travelled, size in ((weights, weight_bytes), (states, optimizer_bytes)):
        for move in travelled:
            sent[move.source_rank] += size
            received[move.rank] += size
    return MigrationCost(
        experts=len(weights),
        weight_bytes=weight_bytes * len(weights),
        optimizer_bytes=optimizer_bytes * len(states),
        busiest_rank_bytes=max([*sent.values(), *received.values()], default=0),
    )
