"""The cost model: seconds of a layer's experts, of their exchanges and of a migration, from rates of a machine.

A guard compares with it what a plan gains to what its migration costs; `toolkit.lab.simulate` predicts steps
with it. Letters: `S` source ranks, `R` ranks of the EP group, `E` experts, `G` global slots; `...` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from toolkit.experts.placement.loads import Floats, shares
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.placement_options import ExpertExchange
from toolkit.experts.placement.traffic import (
    expected_visits,
    hierarchical_rows,
    migration_cost,
    replica_rows,
    rows_between_ranks,
)

LINK_BYTES_PER_SECOND = 10e9
"""Assumed, not measured: nearly a network card of 100 Gbit/s. Links within a node are faster; there the guard refuses
a few plans too many."""
EXCHANGES = 5
"""All-to-alls of a layer in a step: sizes; dispatch and combine, forward and backward."""
HIERARCHICAL_EXCHANGES = 2 * EXCHANGES
"""The same between nodes, and inside them."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Processor cores that the ranks of one host share, each rank computing on one thread."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    count: Annotated[int, Field(ge=1)]
    busy_slowdown: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Seconds of a piece of work on each core at once, over those of one core alone: memory and caches are shared."""

    def slowdown(self, ranks: NDArray[Any]) -> Floats:
        """Returns the seconds of a piece of work where so many ranks compute at once, over those of one rank alone."""
        others = np.minimum(ranks, self.count) - 1
        shared = 1 + (self.busy_slowdown - 1) * others / max(self.count - 1, 1)
        return np.asarray(shared * np.maximum(1.0, ranks / self.count))

    def seconds(self, work_R: NDArray[Any]) -> Floats:
        """Returns (...), the time until the last rank is done with its `work_R` (..., R), in seconds of one rank alone.
        Ranks that are not done share the cores evenly."""
        ranks = work_R.shape[-1]
        ascending = np.sort(work_R, axis=-1)
        parts = np.diff(ascending, axis=-1, prepend=0.0)
        return np.asarray(parts @ self.slowdown(np.arange(ranks, 0, -1)))


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer in each of several steps, forward and backward."""

    router: Floats
    """Routing, and the order of rows, on the ranks that send."""
    experts: Floats
    exchanges: Floats
    """All-to-alls of rows."""
    replicas: Floats
    """Gradients to owners, and weights back."""

    @property
    def total(self) -> Floats:
        return self.router + self.experts + self.exchanges + self.replicas


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds per row and per byte of one layer. Ranks compute and send at the same time, so the busiest one counts;
    where they share `cores`, those that are done leave them to the others.

    A guard needs the first three. All others are 0 or None where they are not known, and then cost nothing.
    """

    seconds_per_row: float
    """Compute of one assignment, forward and backward, on one rank."""
    bytes_per_second: float
    """The speed of one rank's link, each way; between nodes, where `ranks_per_node` is given."""
    weight_bytes: int
    """The weights of one physical expert."""
    optimizer_bytes: int = 0
    """The optimizer state of one expert, at its owner."""
    seconds_per_slot: float = 0.0
    """The time of each slot of a rank, however many rows it has: its weights are read, its weight gradients written."""
    seconds_per_layer: float = 0.0
    """The time of a layer without rows, on each rank."""
    seconds_per_row_sent: float = 0.0
    """Routing, sorting and copying of one row where it comes from, forward and backward."""
    row_bytes: int = 0
    """The bytes of one row in dispatch and combine together; the backward sends as much again."""
    exchange_seconds: float = 0.0
    """The time of one all-to-all without rows."""
    ranks_per_node: int | None = None
    """None: all ranks are in one node, or links within a node are like those between nodes."""
    node_bytes_per_second: float | None = None
    """The speed of one rank's link to the others of its node, each way; None: `bytes_per_second`."""
    cores: Cores | None = None
    """None: each rank has a processor of its own."""
    exchange: ExpertExchange = "flat"
    """Says whether a token's row goes to each rank that has experts of it, or first to each node, for which ranks are
    on several nodes of `ranks_per_node`."""
    top_k: int = 1
    """Experts of a token, which the hierarchical exchange depends on."""
    nodes_per_token: int | None = None
    """Nodes that the router chooses for a token before it chooses experts on these; None: no such choice."""

    def step_seconds(self, load_E: NDArray[Any], placement: ExpertPlacement) -> float:
        """Returns the seconds of the busiest rank's experts in a step with `load_E` rows per expert, and of what
        replicas send: gradients to their owners, and weights back."""
        experts = self.expert_seconds(load_E @ shares(placement), placement.slots_per_rank)
        return float(experts + self.replica_seconds(replica_rows(placement) * self.weight_bytes))

    def expert_seconds(self, rows_R: NDArray[Any], slots_R: Sequence[int]) -> Floats:
        """Returns (...), the seconds until the last rank, with `slots_R` slots, has computed its `rows_R` (..., R)."""
        return self.together(rows_R * self.seconds_per_row + np.asarray(slots_R) * self.seconds_per_slot)

    def layer_seconds(self, load_SE: NDArray[Any], placement: ExpertPlacement) -> LayerSeconds:
        """Returns the seconds of steps with `load_SE` (..., S, E) assignments; S are the ranks of `placement`."""
        weights_RR = replica_rows(placement) * self.weight_bytes
        return self.seconds_of_rows(rows_between_ranks(load_SE, placement), placement.slots_per_rank, weights_RR)

    def seconds_of_rows(
        self, rows_SR: NDArray[Any], slots_R: Sequence[int], weights_RR: NDArray[Any] | None = None
    ) -> LayerSeconds:
        """Returns the seconds of steps in which ranks with `slots_R` slots send each other `rows_SR` (..., S, R)
        assignments, and, if not None, `weights_RR` bytes of weights from owners, and as many of gradients back."""
        latency = self.exchange_seconds if len(slots_R) > 1 else 0.0
        sent_S, exchanges = self._exchanges(rows_SR, sum(slots_R), latency)
        replicas = np.zeros(rows_SR.shape[:-2])
        if weights_RR is not None:
            replicas = replicas + self.replica_seconds(weights_RR)
        return LayerSeconds(
            router=self.together(sent_S * self.seconds_per_row_sent + self.seconds_per_layer),
            experts=self.expert_seconds(rows_SR.sum(-2), slots_R),
            exchanges=exchanges,
            replicas=replicas,
        )

    def replica_seconds(self, weights_RR: NDArray[Any]) -> Floats:
        """Returns the seconds in which `weights_RR` (R, R) bytes of weights come from owners, and as many of gradients
        go back."""
        if not weights_RR.any():
            return np.zeros(())
        return 2 * (self.transfer_seconds(weights_RR) + self.exchange_seconds)

    def can_be_hierarchical(self, ranks: int) -> bool:
        """Returns whether so many ranks are on several equal nodes."""
        per_node = self.ranks_per_node or ranks
        return ranks % per_node == 0 and ranks > per_node

    def _exchanges(self, rows_SR: NDArray[Any], slots: int, latency: float) -> tuple[NDArray[Any], Floats]:
        """Returns (..., S), rows that each rank puts in order and sends; (...): seconds of the exchanges of rows."""
        ranks = rows_SR.shape[-1]
        per_node = self.ranks_per_node or ranks
        limit = None if self.nodes_per_token is None else self.nodes_per_token * per_node
        visits_SR = expected_visits(rows_SR, ranks, top_k=self.top_k, slots=slots, nodes_per_token=limit)
        if self.exchange == "flat":
            return visits_SR.sum(-1), self.seconds_of_visits(visits_SR) + EXCHANGES * latency
        if not self.can_be_hierarchical(ranks):
            raise ValueError(f"{ranks} ranks with {self.ranks_per_node} per node are not on several equal nodes")
        nodes = ranks // per_node
        visits_SM = expected_visits(rows_SR, nodes, top_k=self.top_k, slots=slots, nodes_per_token=self.nodes_per_token)
        between, inside = hierarchical_rows(visits_SR, visits_SM)
        # One after the other: a row is spread inside a node once it is there.
        seconds = self.seconds_of_visits(between) + self.seconds_of_visits(inside)
        return between.sum(-1) + inside.sum(-1), seconds + HIERARCHICAL_EXCHANGES * latency

    def seconds_of_visits(self, visits_SR: NDArray[Any]) -> Floats:
        """Returns (...), the seconds in which rows go to the ranks that they visit, (..., S, R) of them, and return, in
        the forward and in the backward, without latency."""
        return 2 * self.transfer_seconds(visits_SR * self.row_bytes)

    def transfer_seconds(self, bytes_SR: NDArray[Any]) -> Floats:
        """Returns (...), the seconds until each rank has sent and received its part of `bytes_SR` (..., S, R), without
        latency. Links work in both directions at once, those within a node beside those between nodes."""
        ranks = np.arange(bytes_SR.shape[-1])
        node_R = ranks // (self.ranks_per_node or len(ranks))
        near = node_R[:, None] == node_R
        inside = near & (ranks[:, None] != ranks)
        slow = self._busier_way(np.where(near, 0, bytes_SR)) / self.bytes_per_second
        fast = self._busier_way(np.where(inside, bytes_SR, 0)) / (self.node_bytes_per_second or self.bytes_per_second)
        return self.together(np.maximum(slow, fast))

    def migration_seconds(self, old: ExpertPlacement, new: ExpertPlacement) -> float:
        """Returns the seconds to go from `old` to `new`; 0 where they are equal."""
        if old == new:
            return 0.0
        cost = migration_cost(old, new, weight_bytes=self.weight_bytes, optimizer_bytes=self.optimizer_bytes)
        return cost.busiest_rank_bytes / self.bytes_per_second

    def together(self, seconds_R: NDArray[Any]) -> Floats:
        """Returns (...), the seconds until the last rank is done with its part (..., R), which takes so many seconds of
        a rank alone."""
        return np.asarray(seconds_R.max(-1)) if self.cores is None else self.cores.seconds(seconds_R)

    @staticmethod
    def _busier_way(bytes_SR: NDArray[Any]) -> NDArray[Any]:
        """Returns (..., R), what each rank sends, or receives, whichever is more."""
        return np.maximum(bytes_SR.sum(-1), bytes_SR.sum(-2))
