"""Rows and bytes between ranks: dispatch and combine under a placement, and the cost of a migration.

Letters: `S` source ranks (those of the EP group), `E` experts, `R` ranks, `G` global slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.loads import Floats, Ints
from toolkit.experts.placement.placement import ExpertPlacement, bytes_moved, bytes_on_busiest_rank, moves, owner_moves


def rows_per_slot(load_SE: NDArray[Any], placement: ExpertPlacement, *, sources: Sequence[int] | None = None) -> Ints:
    """Returns int64 (..., S, G), how many of each rank's assignments go to each slot, in one forward or in each of
    several.

    A rank that has a replica of the expert uses it. Otherwise the i-th of a rank's tokens for an expert with n replicas
    goes to replica (rank + i) mod n. `sources` names the ranks of S; None means all. Raises ValueError unless `load_SE`
    is (..., S, E).
    """
    load = np.asarray(load_SE, dtype=np.int64)
    source_S = np.arange(placement.ranks) if sources is None else np.asarray(sources)
    if load.shape[-2:] != (len(source_S), placement.num_experts):
        raise ValueError(f"load has shape {load.shape}, not (..., {len(source_S)}, {placement.num_experts})")
    rows = np.zeros((*load.shape[:-1], placement.ranks * placement.stride), dtype=np.int64)
    rows[..., list(placement.slot_of_expert)] = load
    if not placement.has_replicas:
        return rows
    for expert in range(placement.num_experts):
        places = placement.replicas(expert)
        if len(places) == 1:
            continue
        slots = [rank * placement.stride + slot for rank, slot in places]
        turn_SC = (np.arange(len(places)) - source_S[:, None]) % len(places)
        rows[..., slots] = (load[..., expert, None] + len(places) - 1 - turn_SC) // len(places)
        for (rank, _), slot in zip(places, slots, strict=True):
            for source in np.flatnonzero(source_S == rank):
                rows[..., source, slots] = 0
                rows[..., source, slot] = load[..., source, expert]
    return rows


@dataclass(frozen=True)
class Traffic:
    """Rows between ranks in one pass: dispatch sends them, combine returns as many; the backward does both again. Or
    the assignments that they are sent for."""

    rows_SR: Ints
    """What each rank sends to each; the diagonal stays on its rank."""

    def bytes_trained(self, dispatched: int, combined: int) -> Ints:
        """Returns (R), sent by each rank to others in a forward and its backward, given bytes per row of the two
        exchanges."""
        sent_and_returned_R = self.rows_SR.sum(1) + self.rows_SR.sum(0) - 2 * self.rows_SR.diagonal()
        return np.asarray(sent_and_returned_R * (dispatched + combined))

    def cross_node_rows(self, node_of_rank: Sequence[int]) -> int:
        """Returns the rows that go to another node, one for each assignment: two for a token with two experts on
        another node."""
        node = np.asarray(node_of_rank)
        return int(self.rows_SR[node[:, None] != node].sum())

    def cross_node_fraction(self, node_of_rank: Sequence[int]) -> float:
        """Returns the part of all rows that goes to another node, see `cross_node_rows`; 0 where there are none."""
        total = int(self.rows_SR.sum())
        return self.cross_node_rows(node_of_rank) / total if total else 0.0


def rows_between_ranks(
    load_SE: NDArray[Any], placement: ExpertPlacement, *, sources: Sequence[int] | None = None
) -> Ints:
    """Returns int64 (..., S, R), how many of each rank's assignments go to each rank; see `rows_per_slot`."""
    rows = rows_per_slot(load_SE, placement, sources=sources)
    return rows.reshape(*rows.shape[:-1], placement.ranks, placement.stride).sum(-1)


def visits_of_choices(ids_STK: NDArray[Any], placement: ExpertPlacement) -> Ints:
    """Returns int64 (S, R), tokens of each rank that have experts on each rank, given the experts (S, T, K) of tokens
    of all ranks; negative ids are none. Replicas are taken as in `rows_per_slot`."""
    ranks, top_k = placement.ranks, ids_STK.shape[-1]
    rank_EC = placement.slots_of_experts().numpy() // placement.stride  # padded with -1
    replicas_E = placement.num_replicas().numpy()
    visits_SR = np.zeros((len(ids_STK), ranks), dtype=np.int64)
    for source, ids_TK in enumerate(ids_STK):
        id_N = ids_TK.flatten()
        turn_N = (_earlier(id_N) + source) % replicas_E[id_N]
        rank_N = np.where((rank_EC == source).any(1)[id_N], source, rank_EC[id_N, turn_N])
        visits_TR = np.zeros((len(ids_TK), ranks + 1), dtype=bool)
        np.put_along_axis(visits_TR, np.where(id_N < 0, ranks, rank_N).reshape(-1, top_k), True, axis=1)
        visits_SR[source] = visits_TR[:, :ranks].sum(0)
    return visits_SR


def _earlier(id_N: Ints) -> Ints:
    """Returns (N), how many earlier elements are the same."""
    order_N = id_N.argsort(kind="stable")
    in_order_N = id_N[order_N]
    earlier_N = np.empty_like(id_N)
    earlier_N[order_N] = np.arange(len(id_N)) - np.searchsorted(in_order_N, in_order_N)
    return earlier_N


def hierarchical_rows(visits_SR: NDArray[Any], visits_SM: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns twice (..., S, R), rows between nodes, and rows inside them, if each token goes to a node once.

    `visits_SR` (..., S, R): tokens of each rank that have experts on each rank, with equally many consecutive ranks on
    each of M nodes; `visits_SM` (..., S, M): those that have experts on each node. A row goes to the rank with the
    place of its source on the other node, and from there to the ranks that it visits; what stays on a rank is on a
    diagonal. Raises ValueError where nodes would be unequal.
    """
    *lead, ranks, nodes = visits_SM.shape
    size = ranks // nodes
    if size * nodes != ranks:
        raise ValueError(f"{ranks} ranks are not equally many on each of {nodes} nodes")
    by_place = visits_SR.reshape(*lead, nodes, size, nodes, size).sum(-4)
    inside = np.einsum("...ibj,ab->...aibj", by_place, np.eye(nodes, dtype=visits_SR.dtype))
    places = np.eye(size, dtype=visits_SM.dtype)
    between = np.einsum("...aib,ij->...aibj", visits_SM.reshape(*lead, nodes, size, nodes), places)
    return between.reshape(visits_SR.shape), inside.reshape(visits_SR.shape)


def expected_visits(
    rows_SR: NDArray[Any], nodes: int, *, top_k: int, slots: int, nodes_per_token: int | None = None
) -> Floats:
    """Returns (..., S, M), tokens of each rank that have experts on each of `nodes`, given `rows_SR` (..., S, R)
    assignments to each rank, `top_k` per token.

    An estimate, because loads do not tell which experts one token chose. Exact where each of a token's choices is any
    of the `slots` that it has not chosen yet, all equally likely; too high where experts of one node are chosen
    together. `nodes_per_token`: of a router that chooses so many nodes first, and experts on these.
    """
    limit = min(nodes_per_token or nodes, nodes)
    rows_SM = rows_SR.reshape(*rows_SR.shape[:-1], nodes, -1).sum(-1)
    tokens = rows_SR.sum(-1, keepdims=True) / top_k
    share_SM = rows_SM / np.maximum(rows_SR.sum(-1, keepdims=True), 1) * nodes / limit
    open_slots = slots * limit / nodes
    none_SM = np.ones(rows_SM.shape)
    for chosen in range(top_k):
        none_SM = none_SM * np.maximum(0.0, 1 - share_SM * open_slots / max(open_slots - chosen, 1))
    visits_SM = tokens * limit / nodes * (1 - none_SM)
    return np.asarray(np.clip(visits_SM, rows_SM / top_k, np.minimum(rows_SM, tokens)))


def replica_rows(placement: ExpertPlacement) -> Ints:
    """Returns int64 (R, R), of how many experts that each rank owns each rank has a replica."""
    rows_RR = np.zeros((placement.ranks, placement.ranks), dtype=np.int64)
    for expert in range(placement.num_experts):
        owner, *others = placement.replicas(expert)
        for place in others:
            rows_RR[owner.rank, place.rank] += 1
    return rows_RR


@dataclass(frozen=True)
class MigrationCost:
    """What one change of placement sends."""

    experts: int
    """Physical experts that leave their rank."""
    weight_bytes: int
    optimizer_bytes: int
    busiest_rank_bytes: int
    """Sent or received by one rank, the larger; what the time depends on."""
    peers: int
    """Pairs of ranks of which one sends to the other."""

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes


def migration_cost(
    old: ExpertPlacement, new: ExpertPlacement, *, weight_bytes: int, optimizer_bytes: int = 0
) -> MigrationCost:
    """Returns the cost of going from `old` to `new`, given the bytes of a physical expert's weights and of an expert's
    optimizer state."""
    weights = moves(old, new)
    states = owner_moves(old, new)
    pairs = {(move.source_rank, move.rank) for move in [*weights, *(states if optimizer_bytes else [])] if move.travels}
    return MigrationCost(
        experts=sum(move.travels for move in weights),
        weight_bytes=bytes_moved(weights, weight_bytes),
        optimizer_bytes=bytes_moved(states, optimizer_bytes),
        busiest_rank_bytes=bytes_on_busiest_rank([(weights, weight_bytes), (states, optimizer_bytes)]),
        peers=len(pairs),
    )
