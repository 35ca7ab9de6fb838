"""Planners replayed on the loads of a recorded run, or on synthetic ones.

Letters as in `toolkit.experts.routing.metrics`, and `T` optimizer steps. A plan made from one window is in force in the
next, so all figures leave out the first window.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UserError
from toolkit.experts.layer.routing_log import RowBytes
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard
from toolkit.experts.placement.loads import Ints, rank_imbalance
from toolkit.experts.placement.placement import ExpertPlacement, initial_placement
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.placement.planners import PLANNERS
from toolkit.experts.placement.planners.bounds import lower_bound
from toolkit.experts.placement.planners.registry import Planner
from toolkit.experts.placement.traffic import expected_visits, migration_cost, replica_rows
from toolkit.experts.routing.metrics import DispatchCounts, Window, balance_metrics, count, traffic_metrics
from toolkit.experts.routing.traces import Trace
from toolkit.lab.replay import Replay, replay, worst_span
from toolkit.lab.simulate import Machine, simulate
from toolkit.lab.workloads import WORKLOADS, Sizes

STAY = "stay"
"""No planner: the initial placement."""
REPLICATING = {"replicate"}
"""Planners that put replicas in spare slots. Without `spare_slots` they are given one per rank."""
ASSUMED = Machine(seconds_per_row=1e-6, bytes_per_second=25e9)
"""A GPU's time for an assignment to an expert of 6 million parameters, and a link of 200 Gbit/s. The rest of a step is
left out."""


@dataclass(frozen=True)
class Case:
    """Loads to try planners on."""

    name: str
    load_TLSE: Ints
    row_bytes: tuple[RowBytes, ...]
    weight_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    digest: str
    seed: Any


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of one report, for all planners."""

    every: int = 20
    """Steps between plans."""
    spare_slots: int = 0
    """Empty slots per rank in the initial placement."""
    initial_placement: InitialPlacement = "contiguous"
    machine: Machine = ASSUMED

    def cost_model(self, case: Case, layer: int) -> CostModel:
        size = case.row_bytes[layer]
        return self.machine.cost_model(
            row_bytes=size.dispatched + size.combined,
            weight_bytes=case.weight_bytes[layer],
            optimizer_bytes=case.optimizer_bytes[layer],
        )


def on_ranks(load_TLSE: NDArray[Any], ranks: int) -> Ints:
    """Returns the loads on `ranks` source ranks: sources with the same EP rank are added up, or each is split evenly.
    Raises UserError if neither number divides the other."""
    load = np.asarray(load_TLSE, dtype=np.int64)
    steps, layers, sources, experts = load.shape
    if sources % ranks == 0:
        return load.reshape(steps, layers, sources // ranks, ranks, experts).sum(2)
    if ranks % sources:
        raise UserError(f"--ranks {ranks}: take a divisor or a multiple of the trace's {sources} source(s).")
    parts = ranks // sources
    # The remainder of each expert goes to different parts.
    more = (np.arange(parts)[:, None] + np.arange(experts)) % parts < (load % parts)[..., None, :]
    return (load[..., None, :] // parts + more).reshape(steps, layers, ranks, experts)


def case_of_trace(name: str, trace: Trace, ranks: int | None = None) -> Case:
    """Returns the case of a recorded run, on `ranks` or on its own `ep_size`."""
    facts = trace.metadata
    return Case(
        name,
        on_ranks(trace.load_TLSE(), ranks or facts["ep_size"]),
        tuple(trace.row_bytes),
        tuple(facts["weight_bytes"]),
        tuple(facts["optimizer_bytes"]),
        trace.digest,
        facts.get("seed"),
    )


def case_of_workload(name: str, sizes: Sizes) -> Case:
    """Returns one of `toolkit.lab.workloads`, with experts of 6 million bfloat16 weights and float32 Adam
    state."""
    load_TLSE = WORKLOADS[name](sizes)[:, None]
    expert = 3 * 2048 * 1024
    digest = hashlib.sha256(np.ascontiguousarray(load_TLSE, dtype="<i8").tobytes()).hexdigest()
    return Case(name, load_TLSE, (RowBytes(4096, 4096),), (2 * expert,), (12 * expert,), digest, sizes.seed)


def try_planner(case: Case, name: str, *, guarded: bool, rules: Rules) -> dict[str, Any]:
    """Returns one row of the report, for the planner `name` or `STAY`; `series` holds the imbalance of each step.

    Raises UserError where `case` has too few steps for `rules.every`.
    """
    load_TLSE, every = case.load_TLSE, rules.every
    steps, layers, ranks, _ = load_TLSE.shape
    runs, seconds = _replays(case, name, guarded=guarded, rules=rules)
    window = _window(load_TLSE, runs, every)
    nodes = [rank // (rules.machine.ranks_per_node or ranks) for rank in range(ranks)]
    last = [run.placements[-1] for run in runs]
    balance = balance_metrics(window, last)
    slots = sum(last[0].slots_per_rank)
    visits_LWR = expected_visits(window.sent_LWR, ranks, top_k=rules.machine.top_k, slots=slots)
    sent = replace(window, visits_LWR=np.rint(visits_LWR).astype(np.int64))
    traffic = traffic_metrics(sent, case.row_bytes, steps=steps - every, node_of_rank=nodes)
    costs = [
        migration_cost(old, new, weight_bytes=case.weight_bytes[layer], optimizer_bytes=case.optimizer_bytes[layer])
        for layer, run in enumerate(runs)
        for old, new in zip(run.placements, run.placements[1:], strict=False)
    ]
    cost_models = [rules.cost_model(case, layer) for layer in range(layers)]
    worst = [
        worst_span(load_TLSE[:, layer].sum(1), run, cost_model)
        for layer, (run, cost_model) in enumerate(zip(runs, cost_models, strict=True))
    ]
    hierarchical = [replace(each, exchange="hierarchical") for each in cost_models if each.can_be_hierarchical(ranks)]
    replicas = name in REPLICATING
    bounds = [
        lower_bound(load_E, placement, replicas=replicas, search=_nodes(load_E))
        for layer, run in enumerate(runs)
        for load_E, placement in _windows(load_TLSE[:, layer], run)
    ]
    return {
        "case": case.name,
        "planner": name,
        "guarded": guarded,
        "imbalance": balance["moe/rank_imbalance"],
        "median": balance["moe/rank_imbalance_median"],
        "p95": balance["moe/rank_imbalance_p95"],
        "bound": float(np.mean(bounds)),
        "plan over bound": _plan_over_bound(load_TLSE, runs, replicas) if name != STAY and not guarded else None,
        "experts moved": sum(cost.experts for cost in costs),
        "MB moved": sum(cost.bytes for cost in costs) / 1e6,
        "replica MB": _replica_bytes(case, runs) / 1e6,
        "worst span": max(worst),
        "step ms": 1e3 * _seconds(load_TLSE, runs, cost_models, rules.machine) / (steps - every),
        "hierarchical ms": 1e3 * _seconds(load_TLSE, runs, hierarchical, rules.machine) / (steps - every)
        if hierarchical
        else None,
        "all-to-all MB": traffic["moe/all_to_all_bytes_per_step"] / 1e6,
        "cross-node": traffic["moe/cross_node_fraction"],
        "planner ms": 1e3 * statistics.median(seconds) if seconds else None,
        "series": window.imbalance_FL.mean(1).tolist(),
    }


def _replays(case: Case, name: str, *, guarded: bool, rules: Rules) -> tuple[list[Replay], list[float]]:
    """Returns what became of each layer, and the processor seconds of each plan; see `try_planner`."""
    load_TLSE, every = case.load_TLSE, rules.every
    steps, layers, ranks, experts = load_TLSE.shape
    if steps <= every:
        raise UserError(f"--every {every}: {case.name} has {steps} steps; take fewer.")
    spare = rules.spare_slots or int(name in REPLICATING)
    start = initial_placement(experts, ranks, rules.initial_placement, spare_slots=spare)
    seconds: list[float] = []
    runs = []
    for layer in range(layers):
        planner = None if name == STAY else _timed(PLANNERS[name], seconds)
        guard = MigrationGuard(rules.cost_model(case, layer)) if guarded else None
        runs.append(replay(load_TLSE[:, layer].sum(1), start, planner, every=every, guard=guard))
    return runs, seconds


def _timed(planner: Planner, seconds: list[float]) -> Callable[..., ExpertPlacement]:
    def timed(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:
        began = time.process_time()
        plan = planner(load_E, current)
        seconds.append(time.process_time() - began)
        return plan

    return timed


def _window(load_TLSE: Ints, runs: list[Replay], every: int) -> Window:
    """Returns the counts of all steps but those of the first window, under the placements in force."""
    ranks = load_TLSE.shape[2]
    counts: DispatchCounts | None = None
    for number, placements in enumerate(zip(*(run.placements for run in runs), strict=True)):
        if number:
            steps = load_TLSE[number * every : (number + 1) * every]
            part = count(steps, placements, sources=range(ranks), world_size=ranks)
            counts = part if counts is None else counts.then(part)
    assert counts is not None
    return Window.of(counts)


def _seconds(load_TLSE: Ints, runs: list[Replay], cost_models: Sequence[CostModel], machine: Machine) -> float:
    """Predicts the seconds of all steps but those of the first window, migrations included."""
    total = 0.0
    before: Sequence[ExpertPlacement] = ()
    for number, placements in enumerate(zip(*(run.placements for run in runs), strict=True)):
        if number:
            steps = load_TLSE[number * runs[0].every : (number + 1) * runs[0].every]
            total += float(simulate(steps, placements, cost_models, machine).total_T.sum())
            changes = zip(cost_models, before, placements, strict=True)
            total += sum(cost_model.migration_seconds(old, new) for cost_model, old, new in changes)
        before = placements
    return total


def _replica_bytes(case: Case, runs: list[Replay]) -> float:
    """Returns the bytes that replicas send in a step, gradients to the owner and weights back; mean over the windows
    after the first."""
    sent = [
        np.mean([2 * case.weight_bytes[layer] * int(replica_rows(placement).sum()) for placement in run.placements[1:]])
        for layer, run in enumerate(runs)
    ]
    return float(sum(sent))


def _windows(load_TSE: Ints, run: Replay) -> list[tuple[NDArray[np.float64], ExpertPlacement]]:
    """Returns mean load and placement of each window but the first."""
    return [
        (load_TSE[number * run.every : (number + 1) * run.every].sum(1).mean(0), placement)
        for number, placement in enumerate(run.placements)
        if number
    ]


def _plan_over_bound(load_TLSE: Ints, runs: list[Replay], replicas: bool) -> float:
    """Returns the worst ratio of a plan's imbalance to the bound, on the load that it was made from."""
    worst = 1.0
    for layer, run in enumerate(runs):
        for number, plan in enumerate(run.placements[1:]):
            load_E = load_TLSE[number * run.every : (number + 1) * run.every, layer].sum(1).mean(0)
            worst = max(
                worst,
                rank_imbalance(load_E, plan) / lower_bound(load_E, plan, replicas=replicas, search=_nodes(load_E)),
            )
    return worst


def _nodes(load_E: NDArray[Any]) -> int:
    """Returns the search nodes for a tighter bound: none for many experts."""
    return 20_000 if len(load_E) <= 32 else 0
