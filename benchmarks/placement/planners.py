"""Milliseconds per plan of each planner, on synthetic loads.

    python benchmarks/placement/planners.py                half a minute

Writes benchmarks/results/planners_cost.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import PLANNERS
from toolkit.lab.workloads import WORKLOADS, Sizes


def start(name: str, experts: int, ranks: int) -> ExpertPlacement:
    placement = contiguous(experts, ranks)
    return with_spare_slots(placement, 1) if name == "replicate" else placement


def cost() -> None:
    """Measure CPU time for 256 experts on 64 ranks: median and maximum over loads, each a median of 9 runs."""
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


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cost()
