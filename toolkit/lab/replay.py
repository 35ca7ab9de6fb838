"""Replay of planners on recorded loads: resulting placements, rank loads and costs.

Loads are int64 (steps, layers, P, E): pairs per rank of an EP group and expert. A plan made from one window is used in
the next, so all results leave out the first window.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, PositiveInt

from toolkit.errors import UserError
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard, plan_layer
from toolkit.experts.placement.loads import Floats, Ints, max_over_mean, shares, window_of
from toolkit.experts.placement.placement import ExpertPlacement, initial_placement
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.placement.planners import find_planner
from toolkit.experts.placement.planners.registry import Planner
from toolkit.experts.placement.traffic import migration_cost, replica_rows, rows_between_ranks
from toolkit.experts.routing.traces import Trace
from toolkit.lab.simulate import Machine, simulate
from toolkit.lab.workloads import WORKLOADS, Sizes

Size = Annotated[int, Field(ge=0, lt=2**53)]
"""Bytes."""
STAY = "stay"
"""No planner: the initial placement."""
ASSUMED = Machine(seconds_per_row=1e-6, bytes_per_second=25e9)
"""GPU time of a pair with a 6-million-parameter expert, and a 200 Gbit/s link. The rest of a step is left out."""


@dataclass(frozen=True)
class Replay:
    """Replay of one layer."""

    rows: Ints
    """Rows computed by each rank, shape (steps, P)."""
    placements: tuple[ExpertPlacement, ...]
    """The placements from step 0, `every`, 2 * `every`, and so on."""
    every: int

    @property
    def imbalance(self) -> Floats:
        """Maximum over mean, shape (steps,)."""
        return max_over_mean(self.rows)

    @property
    def changes(self) -> list[tuple[ExpertPlacement, ExpertPlacement]]:
        return list(zip(self.placements, self.placements[1:], strict=False))


def replay(
    loads: NDArray[Any],
    start: ExpertPlacement,
    planner: Planner | None,
    *,
    every: int,
    guard: MigrationGuard | None = None,
) -> Replay:
    """Replay recorded loads with a plan after each window, made for the window's mean load.

    Args:
        loads: Loads of one layer, int64 (steps, P, E).
        start: Placement of the first window.
        planner: Planner. None: no plans.
        every: Steps per window.
        guard: Check that a plan is worth its migration. None: every plan is applied.
    """
    placement, placements, rows = start, [], []
    for first in range(0, len(loads), every):
        placements.append(placement)
        window = loads[first : first + every]
        rows.append(rows_between_ranks(window, placement).sum(-2))
        if planner is not None and first + every < len(loads):
            plan = plan_layer(planner, window_of(window.sum(1)), placement, guard=guard)
            placement = plan or placement
    return Replay(np.concatenate(rows), tuple(placements), every)


def worst_span(loads: NDArray[Any], run: Replay, cost_model: CostModel) -> float:
    """Return the worst ratio of seconds with plans to seconds without, over spans of two plans: at most 1 if planning
    was never slower. Includes migrations. Without plans, the placement before the span is kept."""
    every = run.every

    def compute(loads: NDArray[Any], placement: ExpertPlacement) -> float:
        rows = loads.sum(1) @ shares(placement)
        return float(cost_model.expert_seconds(rows, placement.slots_per_rank).sum())

    worst = 0.0
    for number, (before, first) in enumerate(run.changes[:-1], start=1):
        second = run.placements[number + 1]
        middle, end = loads[number * every :][:every], loads[(number + 1) * every :][:every]
        spent = compute(middle, first) + compute(end, second)
        spent += cost_model.migration_seconds(before, first) + cost_model.migration_seconds(first, second)
        kept = compute(middle, before) + compute(end, before)
        worst = max(worst, spent / kept if kept else 0.0)
    return worst


# --- a report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Loads to compare planners on, with bytes per layer."""

    name: str
    loads: Ints
    row_bytes: tuple[int, ...]
    """Bytes of one pair, dispatch plus combine."""
    weight_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    digest: str
    seed: Any

    def cost_models(self, machine: Machine) -> list[CostModel]:
        """Return the cost model of each layer."""
        return [
            machine.cost_model(row_bytes=row, weight_bytes=weight, optimizer_bytes=optimizer)
            for row, weight, optimizer in zip(self.row_bytes, self.weight_bytes, self.optimizer_bytes, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of a report, shared by all planners."""

    every: int = 20
    """Steps between plans."""
    spare_slots: int = 0
    """Empty slots per rank in the initial placement. The planner `replicate` gets at least one."""
    initial_placement: InitialPlacement = "contiguous"
    machine: Machine = ASSUMED


def on_ranks(loads: NDArray[Any], ranks: int) -> Ints:
    """Return `loads` for a different number of ranks: source ranks with the same EP rank are summed, or each is split
    evenly. Raises UserError if neither number divides the other."""
    steps, layers, sources, experts = loads.shape
    loads = loads.astype(np.int64)
    if sources % ranks == 0:
        return loads.reshape(steps, layers, sources // ranks, ranks, experts).sum(2)
    if ranks % sources:
        raise UserError(f"--ranks {ranks}: the trace has {sources} source ranks. Take a divisor or a multiple.")
    parts = ranks // sources
    # The remainder of each expert goes to different parts.
    more = (np.arange(parts)[:, None] + np.arange(experts)) % parts < (loads % parts)[..., None, :]
    return (loads[..., None, :] // parts + more).reshape(steps, layers, ranks, experts)


class _Facts(BaseModel):
    """Metadata of a trace, with a size per layer."""

    ep_size: PositiveInt
    row_bytes: list[tuple[Size, Size]]
    weight_bytes: list[Size]
    optimizer_bytes: list[Size]


def case_of_trace(name: str, trace: Trace, ranks: int | None = None) -> Case:
    """Return the case of a recorded run, on `ranks` ranks. Default: its EP group size.

    Raises ValueError if the metadata does not fit the loads.
    """
    facts = _Facts(**trace.metadata)
    layers, sources = trace.load_FLSE.shape[1:3]
    sizes = facts.row_bytes, facts.weight_bytes, facts.optimizer_bytes
    if sources % facts.ep_size or {len(each) for each in sizes} != {layers}:
        raise ValueError(f"its metadata is not of {layers} layers and {sources} ranks")
    return Case(
        name,
        on_ranks(trace.load_TLSE(), ranks or facts.ep_size),
        tuple(map(sum, facts.row_bytes)),
        tuple(facts.weight_bytes),
        tuple(facts.optimizer_bytes),
        trace.digest,
        trace.metadata.get("seed"),
    )


def case_of_recorded(name: str, loads: Ints, ranks: int | None, every: int) -> Case:
    """Return the case of loads of another program, on `ranks` ranks. Default: its source ranks, or 8.

    Experts have the sizes of `case_of_workload`. Idle ones are added up to a multiple of `ranks`. Loads of one step are
    taken as those of two windows of `every` steps.
    """
    ranks = ranks or (8 if loads.shape[2] == 1 else loads.shape[2])
    loads = np.pad(loads, [(0, 0)] * 3 + [(0, -loads.shape[3] % ranks)])
    loads = loads if len(loads) > 1 else np.repeat(loads, 2 * every, axis=0)
    return _case_of_usual_sizes(name, on_ranks(loads, ranks), None)


def case_of_workload(name: str, sizes: Sizes) -> Case:
    """Return one of `toolkit.lab.workloads`, with experts of 6 million bfloat16 weights and float32 Adam state."""
    return _case_of_usual_sizes(name, WORKLOADS[name](sizes)[:, None], sizes.seed)


def _case_of_usual_sizes(name: str, loads: Ints, seed: int | None) -> Case:
    expert, layers = 3 * 2048 * 1024, loads.shape[1]
    digest = hashlib.sha256(np.ascontiguousarray(loads, dtype="<i8").tobytes()).hexdigest()
    row_bytes, weight_bytes, optimizer_bytes = ((each,) * layers for each in (2 * 4096, 2 * expert, 12 * expert))
    return Case(name, loads, row_bytes, weight_bytes, optimizer_bytes, digest, seed)


def try_planner(case: Case, name: str, *, guarded: bool, rules: Rules) -> dict[str, Any]:
    """Return one row of the report, for the planner `name` or `STAY`; `series` is the imbalance of each step."""
    loads, every = case.loads, rules.every
    steps, layers, ranks, experts = loads.shape
    if steps <= every:
        raise UserError(f"--every {every}: {case.name} has {steps} steps. Take fewer.")
    spare = max(rules.spare_slots, int(name == "replicate"))
    start = initial_placement(experts, ranks, rules.initial_placement, spare_slots=spare)
    cost_models = case.cost_models(rules.machine)
    seconds: list[float] = []

    planner = None if name == STAY else find_planner(name)

    def timed(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:
        began = time.process_time()
        assert planner is not None
        plan = planner(load_E, current)
        seconds.append(time.process_time() - began)
        return plan

    runs = []
    for layer, cost_model in enumerate(cost_models):
        guard = MigrationGuard(cost_model) if guarded else None
        runs.append(replay(loads[:, layer], start, planner and timed, every=every, guard=guard))
    imbalance = np.mean([run.imbalance[every:] for run in runs], axis=0)
    changes = [
        (cost_model, change) for cost_model, run in zip(cost_models, runs, strict=True) for change in run.changes
    ]
    costs = [
        migration_cost(old, new, weight_bytes=cost_model.weight_bytes, optimizer_bytes=cost_model.optimizer_bytes)
        for cost_model, (old, new) in changes
    ]
    replicas = [cost_model.weight_bytes * int(replica_rows(new).sum()) for cost_model, (_, new) in changes]
    total = sum(cost_model.migration_seconds(old, new) for cost_model, (old, new) in changes)
    for number, placements in enumerate(zip(*(run.placements[1:] for run in runs), strict=True), start=1):
        window = loads[number * every : (number + 1) * every]
        total += float(simulate(window, placements, cost_models, rules.machine).total.sum())
    return {
        "case": case.name,
        "planner": name,
        "guarded": guarded,
        "imbalance": float(imbalance.mean()),
        "p95": float(np.percentile(imbalance, 95)),
        "experts moved": sum(cost.experts for cost in costs),
        "MB moved": sum(cost.bytes for cost in costs) / 1e6,
        "replica MB": 2 * sum(replicas) * layers / len(replicas) / 1e6,
        "worst span": max(worst_span(loads[:, layer], run, cost_models[layer]) for layer, run in enumerate(runs)),
        "step ms": 1e3 * total / (steps - every),
        "planner ms": 1e3 * statistics.median(seconds) if seconds else None,
        "series": imbalance.tolist(),
    }
