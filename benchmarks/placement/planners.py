"""What planners reach and what they cost, on made-up loads.

    python benchmarks/placement/planners.py                all six tables, about two minutes
    python benchmarks/placement/planners.py cost           milliseconds per plan
    python benchmarks/placement/planners.py scale          milliseconds and memory of a plan on 64 to 4,096 ranks
    python benchmarks/placement/planners.py balance        imbalance beside the bound for the slots given, W0 to W7
    python benchmarks/placement/planners.py small          the same for few experts, beside bounds that are searched for
    python benchmarks/placement/planners.py drift          swaps beside planning from scratch, on load that drifts
    python benchmarks/placement/planners.py guard          plans beside doing nothing, over each span of two plans

Imbalance is max / mean of rows per rank; `bound` is `toolkit.experts.placement.planners.bounds.lower_bound`. Writes
benchmarks/results/planners_<table>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard
from toolkit.experts.placement.loads import rank_imbalance
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import PLANNERS, few_swaps, lpt, planner_named, replicate, swap
from toolkit.experts.placement.planners.bounds import lower_bound
from toolkit.lab.replay import replay, worst_span
from toolkit.lab.workloads import WORKLOADS, Sizes, drifting

SEEDS = 5
SEARCH = 20_000
"""Partial placements looked at per limit, where bounds are searched for."""
MOST_MS = 50.0
"""The target: one plan of one layer."""
EVERY = 20
"""Steps between plans."""
EXPERT = 3 * 2048 * 1024
"""Parameters of an expert of the guard's table."""
COST_MODEL = CostModel(
    seconds_per_row=1e-6, bytes_per_second=25e9, weight_bytes=2 * EXPERT, optimizer_bytes=12 * EXPERT
)
"""A GPU that needs a microsecond per row and a link of 200 Gbit/s; bf16 weights, float32 moments and master weights."""

Row = dict[str, Any]


def start(name: str, experts: int, ranks: int) -> ExpertPlacement:
    placement = contiguous(experts, ranks)
    return with_spare_slots(placement, 1) if name == "replicate" else placement


def cost() -> None:
    """256 experts on 64 ranks, in eights to a node; the median and the slowest of loads, each the median of 9 runs.
    Processor time: planners run on one thread, and machines that run benchmarks are seldom idle."""
    experts, ranks = 256, 64
    rng = np.random.default_rng(0)
    nodes = [rank // 8 for rank in range(ranks)]
    together = rng.integers(0, 100, (experts, experts))
    given: dict[str, dict[str, Any]] = {
        "affinity": {"together_EE": together + together.T},
        "node_aware": {"node_of_rank": nodes, "source_load_RE": rng.integers(0, 9, (ranks, experts))},
    }
    loads = [rng.permutation(np.arange(1, experts + 1.0) ** -skew) for skew in (0.3, 0.6, 1.0)]
    loads += [np.exp(rng.normal(0, sigma, experts)) for sigma in (0.3, 1.0)] + [rng.poisson(1000, experts) * 1.0]
    loads += [WORKLOADS[name](Sizes(steps=5, ranks=ranks, experts=experts)).sum((0, 1)) * 1.0 for name in WORKLOADS]
    contenders: list[tuple[str, str, dict[str, Any]]] = [(name, name, given.get(name, {})) for name in PLANNERS]
    contenders.append(("replicate, 8 nodes", "replicate", {"node_of_rank": nodes}))
    rows = []
    for label, name, options in contenders:
        planner, current = planner_named(name), start(name, experts, ranks)
        milliseconds = [_milliseconds(partial(planner, load, current, **options)) for load in loads]
        rows.append(
            {
                "planner": label,
                "median ms": round(statistics.median(milliseconds), 2),
                "slowest load, ms": round(max(milliseconds), 2),
            }
        )
    write_report("planners_cost", rows, experts=experts, ranks=ranks, loads=len(loads))


def scale() -> None:
    """A plan of one layer for many ranks, from contiguous experts, in eights to a node; where ranks are more than
    experts, some begin empty. The slowest of three loads. Memory: the most that Python and NumPy had allocated at one
    time, without what was given."""
    rows: list[Row] = []
    for ranks in (64, 256, 1024, 4096):
        nodes = [rank // 8 for rank in range(ranks)]
        for experts in (256, 512, 1024):
            rng = np.random.default_rng(0)
            loads = [rng.permutation(np.arange(1, experts + 1.0) ** -skew) for skew in (0.3, 1.0)]
            loads.append(np.exp(rng.normal(0, 1.0, experts)))
            slots = max(1, experts // ranks)
            together = rng.integers(0, 100, (experts, experts))
            given: dict[str, dict[str, Any]] = {
                "affinity": {"together_EE": together + together.T},
                "node_aware": {
                    "node_of_rank": nodes,
                    "source_load_RE": rng.integers(0, 9, (ranks, experts)).astype(np.float64),
                },
            }
            for name in ("lpt", "swap", "few_swaps", "replicate", "affinity", "node_aware"):
                current = contiguous(experts, ranks, slots_per_rank=slots + (name == "replicate"))
                plans = [partial(planner_named(name), load, current, **given.get(name, {})) for load in loads]
                rows.append(
                    {
                        "ranks": ranks,
                        "experts": experts,
                        "planner": name,
                        "ms": round(max(_milliseconds(plan, repeats=3) for plan in plans), 1),
                        "MiB": round(max(map(_mebibytes, plans)), 1),
                    }
                )
    slowest = max(row["ms"] for row in rows)
    write_report("planners_scale", rows, target_ms=MOST_MS, slowest_ms=slowest)


def _mebibytes(function: Callable[[], object]) -> float:
    """The peak of what `function` allocates."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def _milliseconds(function: Callable[[], object], repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times)


def balance() -> None:
    """Plans for the load that they are then judged by: how well experts are packed. The worst of the seeds."""
    rows: list[Row] = []
    for experts, ranks in ((64, 8), (128, 8), (256, 64)):
        for name, workload in WORKLOADS.items():
            found: list[list[float]] = []
            for seed in range(SEEDS):
                sizes = Sizes(steps=EVERY, ranks=ranks, experts=experts, assignments=32768 // ranks, seed=seed)
                load = workload(sizes).sum((0, 1))
                current, spare = start("", experts, ranks), start("replicate", experts, ranks)
                bound, spare_bound = lower_bound(load, current), lower_bound(load, spare, replicas=True)
                from_scratch, swapped = (rank_imbalance(load, plan(load, current)) for plan in (lpt, swap))
                copied = rank_imbalance(load, replicate(load, spare))
                found.append(
                    [
                        rank_imbalance(load, current),
                        bound,
                        from_scratch / bound,
                        swapped / bound,
                        copied,
                        copied / spare_bound,
                    ]
                )
            worst = [round(x, 4) for x in np.max(found, axis=0).tolist()]
            titles = ["contiguous", "bound", "lpt / bound", "swap / bound", "replicate", "replicate / its bound"]
            rows.append(
                {"experts, ranks": f"{experts}, {ranks}", "workload": name, **dict(zip(titles, worst, strict=True))}
            )
    write_report("planners_balance", [*rows, *worst_of(rows)], seeds=SEEDS)


def worst_of(rows: Sequence[Row]) -> list[Row]:
    """A row more for each number of experts and ranks: the greatest of each ratio over the workloads."""
    worst: dict[str, Row] = {}
    for row in rows:
        most = worst.setdefault(row["experts, ranks"], {**row, "workload": "worst"})
        most |= {key: max(most[key], value) for key, value in row.items() if isinstance(value, float)}
    return list(worst.values())


def small() -> None:
    """Few experts seldom divide evenly, so that the bound has to be searched for. Spare: one slot more on each rank."""
    rows: list[Row] = []
    for experts, ranks in ((8, 2), (8, 4), (16, 4), (16, 8)):
        for name, workload in {**WORKLOADS, "drift": drifting}.items():
            ratios: list[list[float]] = []
            for seed in range(SEEDS):
                sizes = Sizes(steps=EVERY, ranks=ranks, experts=experts, assignments=32768 // ranks, seed=seed)
                load = workload(sizes).sum((0, 1))
                spare = start("replicate", experts, ranks)
                ratios.append([])
                for current, planners in ((start("", experts, ranks), (lpt, swap)), (spare, (lpt, swap, replicate))):
                    bounds = {
                        copied: lower_bound(load, current, replicas=copied, search=SEARCH) for copied in (False, True)
                    }
                    ratios[-1] += [
                        rank_imbalance(load, planner(load, current)) / bounds[planner is replicate]
                        for planner in planners
                    ]
            worst = [round(x, 4) for x in np.max(ratios, axis=0).tolist()]
            titles = ["lpt / bound", "swap / bound", "lpt, spare", "swap, spare", "replicate / its bound"]
            rows.append(
                {"experts, ranks": f"{experts}, {ranks}", "workload": name, **dict(zip(titles, worst, strict=True))}
            )
    write_report("planners_small", [*rows, *worst_of(rows)], seeds=SEEDS, search=SEARCH)


def drift() -> None:
    """Imbalance that came about, not what plans promised: means over steps after the first plan, and over seeds."""
    rows: list[Row] = []
    contenders: dict[str, tuple[Any, dict[str, Any]]] = {
        "contiguous": (None, {}),
        "lpt, packing alone": (lpt, {"level": False}),
        "lpt": (lpt, {}),
        "swap": (swap, {}),
        "few_swaps": (few_swaps, {}),
        "swap, 8 moves at most": (swap, {"max_moves": 8}),
        "swap until 1.03": (swap, {"target": 1.03}),
    }
    for experts, ranks in ((64, 8), (128, 8)):
        for sigma in (0.02, 0.05, 0.1):
            loads = [
                drifting(Sizes(steps=400, experts=experts, ranks=ranks, seed=seed), sigma=sigma).sum(1)
                for seed in range(SEEDS)
            ]
            for label, (planner, options) in contenders.items():
                runs = [replay(load, start("", experts, ranks), planner, every=EVERY, **options) for load in loads]
                rows.append(
                    {
                        "experts, ranks": f"{experts}, {ranks}",
                        "sigma per step": sigma,
                        "planner": label,
                        "imbalance": round(float(np.mean([run.imbalance_T[EVERY:].mean() for run in runs])), 3),
                        "moved per plan": round(float(np.mean([run.experts_moved[1:] for run in runs])), 1),
                    }
                )
    write_report("planners_drift", rows, seeds=SEEDS, every=EVERY, skew=0.6)


def guard() -> None:
    """Seconds with plans over seconds without, in the worst span of two plans, migrations included."""
    workloads = dict(WORKLOADS)
    for sigma in (0.02, 0.05, 0.1):
        workloads[f"drift {sigma}"] = lambda sizes, sigma=sigma: drifting(sizes, sigma=sigma)  # type: ignore[misc]
    rows: list[Row] = []
    for name, workload in workloads.items():
        loads = [workload(Sizes(steps=400, seed=seed)).sum(1) for seed in range(SEEDS)]
        for label in ("swap", "few_swaps", "lpt", "replicate"):
            row: Row = {"workload": name, "planner": label}
            for guarded in (False, True):
                runs = [
                    replay(
                        load,
                        start(label, 64, 8),
                        planner_named(label),
                        every=EVERY,
                        guard=MigrationGuard(COST_MODEL) if guarded else None,
                    )
                    for load in loads
                ]
                suffix = ", guarded" if guarded else ""
                row[f"imbalance{suffix}"] = round(float(np.mean([run.imbalance_T.mean() for run in runs])), 3)
                row[f"moved{suffix}"] = round(float(np.mean([sum(run.experts_moved) for run in runs])))
                spans = [worst_span(load, run, COST_MODEL) for load, run in zip(loads, runs, strict=True)]
                row[f"worst span{suffix}"] = round(max(spans), 3)
            rows.append(row)
    never_worse = sum(row["worst span, guarded"] <= 1 for row in rows)
    facts = {"seeds": SEEDS, "every": EVERY, "experts": 64, "ranks": 8}
    write_report("planners_guard", rows, cases=len(rows), cases_that_are_never_worse=never_worse, **facts)


TABLES = {"cost": cost, "scale": scale, "balance": balance, "small": small, "drift": drift, "guard": guard}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=TABLES, help="default: all")
    chosen = parser.parse_args().table
    for table in [chosen] if chosen else TABLES:
        TABLES[table]()
