"""What planners reach and what they cost, on made-up loads.

    python benchmarks/placement/planners.py                both tables, a minute
    python benchmarks/placement/planners.py cost           milliseconds per plan
    python benchmarks/placement/planners.py guard          plans compared with no plans, over each span of two plans

Imbalance is max / mean of rows per rank. Writes benchmarks/results/planners_<table>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import PLANNERS
from toolkit.lab.replay import replay, worst_span
from toolkit.lab.workloads import WORKLOADS, Sizes, drifting

SEEDS = 5
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
    """256 experts on 64 ranks; the median and the slowest of loads, each the median of 9 runs.
    Processor time: planners run on one thread, and machines that run benchmarks are seldom idle."""
    experts, ranks = 256, 64
    rng = np.random.default_rng(0)
    loads = [rng.permutation(np.arange(1, experts + 1.0) ** -skew) for skew in (0.3, 0.6, 1.0)]
    loads += [np.exp(rng.normal(0, sigma, experts)) for sigma in (0.3, 1.0)] + [rng.poisson(1000, experts) * 1.0]
    loads += [WORKLOADS[name](Sizes(steps=5, ranks=ranks, experts=experts)).sum((0, 1)) * 1.0 for name in WORKLOADS]
    rows = []
    for name, planner in PLANNERS.items():
        milliseconds = [_milliseconds(partial(planner, load, start(name, experts, ranks))) for load in loads]
        rows.append(
            {
                "planner": name,
                "median ms": round(statistics.median(milliseconds), 2),
                "slowest load, ms": round(max(milliseconds), 2),
            }
        )
    write_report("planners_cost", rows, experts=experts, ranks=ranks, loads=len(loads))


def _milliseconds(function: Callable[[], object], repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times)


def guard() -> None:
    """Seconds with plans over seconds without, in the worst span of two plans, migrations included."""
    workloads = dict(WORKLOADS)
    for sigma in (0.02, 0.05, 0.1):
        workloads[f"drift {sigma}"] = lambda sizes, sigma=sigma: drifting(sizes, sigma=sigma)  # type: ignore[misc]
    rows: list[Row] = []
    for name, workload in workloads.items():
        loads = [workload(Sizes(steps=400, seed=seed)) for seed in range(SEEDS)]
        for label in ("swap", "lpt", "replicate"):
            row: Row = {"workload": name, "planner": label}
            for guarded in (False, True):
                runs = [
                    replay(
                        load,
                        start(label, 64, 8),
                        PLANNERS[label],
                        every=EVERY,
                        guard=MigrationGuard(COST_MODEL) if guarded else None,
                    )
                    for load in loads
                ]
                suffix = ", guarded" if guarded else ""
                row[f"imbalance{suffix}"] = round(float(np.mean([run.imbalance.mean() for run in runs])), 3)
                row[f"moved{suffix}"] = round(float(np.mean([sum(run.experts_moved) for run in runs])))
                spans = [worst_span(load, run, COST_MODEL) for load, run in zip(loads, runs, strict=True)]
                row[f"worst span{suffix}"] = round(max(spans), 3)
            rows.append(row)
    never_worse = sum(row["worst span, guarded"] <= 1 for row in rows)
    facts = {"seeds": SEEDS, "every": EVERY, "experts": 64, "ranks": 8}
    write_report("planners_guard", rows, cases=len(rows), cases_that_are_never_worse=never_worse, **facts)


TABLES = {"cost": cost, "guard": guard}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=TABLES, help="default: both")
    chosen = parser.parse_args().table
    for table in [chosen] if chosen else TABLES:
        TABLES[table]()
