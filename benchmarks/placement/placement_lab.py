"""Planners on recorded traces and on workloads W0 to W7: the reports of `toolkit lab` in one table.

    python benchmarks/placement/record_traces.py FOLDER       twelve traces of two real runs, some ten minutes
    python benchmarks/placement/placement_lab.py FOLDER       the table, a minute

One row for each case and planner without the guard; the last columns are with the guard. Imbalances are means over
steps. Initial placements are contiguous, for the workloads also round-robin. Writes
benchmarks/results/placement_lab.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.experts.routing.traces import read_trace
from toolkit.lab.replay import STAY, Rules, case_of_trace, case_of_workload, try_planner
from toolkit.lab.workloads import WORKLOADS, Sizes

BLOCKS, TURNS = Rules(every=20), Rules(every=20, initial_placement="round_robin")
PLANNERS = ("lpt", "swap", "replicate")


def swap_and_lpt(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compare `swap` with planning from scratch: on traces, and on workloads from round-robin."""
    found = {}
    cases = {"traces": lambda name: "seed" in name, "round-robin": lambda name: name.endswith(", round-robin")}
    for label, belongs in cases.items():
        swap, lpt = (
            [row for row in rows if row["planner"] == name and belongs(row["case"])] for name in ("swap", "lpt")
        )
        more = [row["imbalance"] - other["imbalance"] for row, other in zip(swap, lpt, strict=True)]
        found[label] = {
            "imbalance minus lpt's, mean": round(statistics.mean(more), 3),
            "largest": round(max(more), 3),
            "times fewer moves": round(sum(row["moved"] for row in lpt) / sum(row["moved"] for row in swap), 1),
        }
    return found


def main(folder: Path) -> None:
    cases = [case_of_trace(path.stem, read_trace(path)) for path in sorted(folder.glob("*.npz"))]
    synthetic = [case_of_workload(name, Sizes(steps=400)) for name in WORKLOADS]
    rows: list[dict[str, Any]] = []
    for case, rules in [*((case, BLOCKS) for case in cases + synthetic), *((case, TURNS) for case in synthetic)]:
        stay = try_planner(case, STAY, guarded=False, rules=rules)
        for name in PLANNERS:
            free, guarded = (try_planner(case, name, guarded=guard, rules=rules) for guard in (False, True))
            rows.append(
                {
                    "case": case.name + (", round-robin" if rules.initial_placement == "round_robin" else ""),
                    "planner": name,
                    "no plans": round(stay["imbalance"], 3),
                    "imbalance": round(free["imbalance"], 3),
                    "moved": free["experts moved"],
                    "worst span": round(free["worst span"], 3),
                    "guarded": round(guarded["imbalance"], 3),
                    "guarded moved": guarded["experts moved"],
                    "guarded worst span": round(guarded["worst span"], 3),
                    "planner ms": round(free["planner ms"], 2),
                }
            )
    digests = {case.name: case.digest for case in cases + synthetic}
    write_report("placement_lab", rows, every=BLOCKS.every, swap_and_lpt=swap_and_lpt(rows), sha256=digests)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of traces")
    main(parser.parse_args().folder)
