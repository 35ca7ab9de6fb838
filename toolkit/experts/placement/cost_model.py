"""The cost model: seconds of a layer's experts, of their exchanges and of a migration, from rates of a machine.

The guard compares a plan's gain with its migration by it, and `toolkit.lab.simulate` predicts steps with it. Letters:
`E` experts, `P` ranks of an EP group, `...` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat, PositiveInt

from toolkit.experts.options import Options
from toolkit.experts.placement.loads import Floats, shares
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.traffic import expected_visits, migration_cost, replica_rows, rows_between_ranks

EXCHANGES = 5
"""All-to-alls of a layer in a step: sizes; dispatch and combine, forward and backward."""


class Cores(Options):
    """Processor cores that the ranks of one machine share, each rank computing on one thread."""

    count: PositiveInt
    busy_slowdown: PositiveFloat = 1.0
    """Seconds of a piece of work on each core at once, divided by those on a single busy core: memory is shared."""

    def slowdown(self, ranks: NDArray[Any]) -> Floats:
        """Return the seconds of a piece of work if `ranks` ranks compute at once, divided by those of a single rank."""
        others = np.minimum(ranks, self.count) - 1
        shared = 1 + (self.busy_slowdown - 1) * others / max(self.count - 1, 1)
        return np.asarray(shared * np.maximum(1.0, ranks / self.count))

    def seconds(self, work_P: NDArray[Any]) -> Floats:
        """Return (...), the time until the last rank is done with its `work_P` (..., P), in seconds of a single rank.
        Ranks that are not done share the cores evenly."""
        ranks = work_P.shape[-1]
        ascending = np.sort(work_P, axis=-1)
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


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds per row and per byte of one layer. Ranks compute and send at the same time, so the busiest rank counts;
    ranks that share `cores` leave them to the others once they are done.

    Fields with a default cost nothing at it.
    """

    seconds_per_row: float
    """Compute of one (token, expert) pair, forward and backward, on one rank."""
    bytes_per_second: float
    """Speed of one rank's link, in each direction."""
    weight_bytes: int
    """Weights of one physical expert."""
    optimizer_bytes: int = 0
    """Optimizer state of one expert, at its owner."""
    seconds_per_slot: float = 0.0
    """Time of each slot of a rank, however many rows it has: its weights are read, its weight gradients written."""
    seconds_per_layer: float = 0.0
    """Time of a layer without rows, on each rank."""
    seconds_per_row_sent: float = 0.0
    """Routing, sorting and copying of one row where it comes from, forward and backward."""
    row_bytes: int = 0
    """Bytes of one row in dispatch and combine together; the backward pass sends as much again."""
    exchange_seconds: float = 0.0
    """Time of one all-to-all without rows."""
    cores: Cores | None = None
    """None: each rank has a processor of its own."""
    top_k: int = 1
    """Experts of a token."""

    def step_seconds(self, load_E: NDArray[Any], placement: ExpertPlacement) -> float:
        """Return the seconds of the busiest rank's experts and of replica traffic in a step with `load_E` rows per
        expert."""
        experts = self.expert_seconds(load_E @ shares(placement), placement.slots_per_rank)
        return float(experts + self.replica_seconds(placement))

    def layer_seconds(self, load_PE: NDArray[Any], placement: ExpertPlacement) -> LayerSeconds:
        """Return the seconds of steps with `load_PE` (..., P, E) pairs from each rank for each expert."""
        rows_PP = rows_between_ranks(load_PE, placement)
        slots_P = placement.slots_per_rank
        visits_PP = expected_visits(rows_PP, top_k=self.top_k, slots=sum(slots_P))
        latency = EXCHANGES * self.exchange_seconds if len(slots_P) > 1 else 0.0
        return LayerSeconds(
            router=self.until_last(visits_PP.sum(-1) * self.seconds_per_row_sent + self.seconds_per_layer),
            experts=self.expert_seconds(rows_PP.sum(-2), slots_P),
            exchanges=self.seconds_of_visits(visits_PP) + latency,
            replicas=np.full(rows_PP.shape[:-2], self.replica_seconds(placement)),
        )

    def expert_seconds(self, rows_P: NDArray[Any], slots_P: Sequence[int]) -> Floats:
        """Return (...), the seconds until the last rank, with `slots_P` slots, has computed its `rows_P` (..., P)."""
        return self.until_last(rows_P * self.seconds_per_row + np.asarray(slots_P) * self.seconds_per_slot)

    def replica_seconds(self, placement: ExpertPlacement) -> float:
        """Return the seconds in which replicas send their gradients to owners, and owners weights back."""
        weights_PP = replica_rows(placement) * self.weight_bytes
        return 2 * (float(self._transfer_seconds(weights_PP)) + self.exchange_seconds) if weights_PP.any() else 0.0

    def seconds_of_visits(self, visits_PP: NDArray[Any]) -> Floats:
        """Return (...), the seconds in which rows go to the ranks that they visit, (..., P, P) of them, and return, in
        the forward and in the backward pass, without latency."""
        return 2 * self._transfer_seconds(visits_PP * self.row_bytes)

    def migration_seconds(self, old: ExpertPlacement, new: ExpertPlacement) -> float:
        """Return the seconds to go from `old` to `new`."""
        cost = migration_cost(old, new, weight_bytes=self.weight_bytes, optimizer_bytes=self.optimizer_bytes)
        return cost.busiest_rank_bytes / self.bytes_per_second

    def until_last(self, seconds_P: NDArray[Any]) -> Floats:
        """Return (...), the seconds until the last rank is done with its part (..., P), given in seconds of a single
        rank."""
        return np.asarray(seconds_P.max(-1)) if self.cores is None else self.cores.seconds(seconds_P)

    def _transfer_seconds(self, bytes_PP: NDArray[Any]) -> Floats:
        """Return (...), the seconds until each rank has sent and received its part of `bytes_PP` (..., P, P), without
        latency. Links are full-duplex; rows that stay on a rank cost nothing."""
        leaving_PP = np.where(np.eye(bytes_PP.shape[-1], dtype=bool), 0, bytes_PP)
        busier_P = np.maximum(leaving_PP.sum(-1), leaving_PP.sum(-2))
        return self.until_last(busier_P / self.bytes_per_second)
