"""Planners on recorded traces and on workloads W0 to W7: the reports of `toolkit lab` in one table.

    python benchmarks/placement/record_traces.py FOLDER       twelve traces of two real runs, some ten minutes
    python benchmarks/placement/placement_lab.py FOLDER       the table, a minute

A row for each case and planner without the guard; the last columns are the same planner with it. `over bound` is the
worst plan on the load that it was made for; imbalances are means over steps. Initial placements are contiguous; on
the workloads round-robin too. Writes benchmarks/results/placement_lab.json.
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
from toolkit.lab.report import STAY, Rules, case_of_trace, case_of_workload, try_planner
from toolkit.lab.workloads import WORKLOADS, Sizes

BLOCKS, TURNS = Rules(every=20), Rules(every=20, initial_placement="round_robin")
PLANNERS = ("lpt", "swap", "few_swaps", "replicate")


def beside_lpt(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What exchanges give up and save beside planning from scratch: on traces, and on workloads from round-robin."""
    found = {}
    cases = {"traces": lambda name: "seed" in name, "round-robin": lambda name: name.endswith(", round-robin")}
    for label, belongs in cases.items():
        scratch = {row["case"]: row for row in rows if row["planner"] == "lpt" and belongs(row["case"])}
        for planner in ("swap", "few_swaps"):
            pairs = [
                (row, scratch[row["case"]]) for row in rows if row["planner"] == planner and row["case"] in scratch
            ]
            if not pairs:
                continue
            more = [row["imbalance"] - other["imbalance"] for row, other in pairs]
            fewer = [other["moved"] / row["moved"] for row, other in pairs if row["moved"]]
            found[f"{planner}, {label}"] = {
                "imbalance less that of lpt, mean": round(statistics.mean(more), 3),
                "worst": round(max(more), 3),
                "cases": len(pairs),
                "within 0.01": sum(each < 0.0105 for each in more),
                "times fewer moves, all together": round(
                    sum(other["moved"] for _, other in pairs) / sum(row["moved"] for row, _ in pairs), 2
                ),
                "median": round(statistics.median(fewer), 1),
                "least": round(min(fewer), 1),
            }
    return found


def main(folder: Path) -> None:
    cases = [case_of_trace(path.stem, read_trace(path)) for path in sorted(folder.glob("*.npz"))]
    made_up = [case_of_workload(name, Sizes(steps=400)) for name in WORKLOADS]
    rows: list[dict[str, Any]] = []
    for case, rules in [*((case, BLOCKS) for case in cases + made_up), *((case, TURNS) for case in made_up)]:
        stay = try_planner(case, STAY, guarded=False, rules=rules)
        for name in PLANNERS:
            free, guarded = (try_planner(case, name, guarded=guard, rules=rules) for guard in (False, True))
            rows.append(
                {
                    "case": case.name + (", round-robin" if rules.initial_placement == "round_robin" else ""),
                    "planner": name,
                    "doing nothing": round(stay["imbalance"], 3),
                    "imbalance": round(free["imbalance"], 3),
                    "over bound": round(free["plan over bound"], 4),
                    "moved": free["experts moved"],
                    "worst span": round(free["worst span"], 3),
                    "guarded": round(guarded["imbalance"], 3),
                    "guarded moved": guarded["experts moved"],
                    "guarded worst span": round(guarded["worst span"], 3),
                    "planner ms": round(free["planner ms"], 2),
                }
            )
    digests = {case.name: case.digest for case in cases + made_up}
    write_report("placement_lab", rows, every=BLOCKS.every, beside_lpt=beside_lpt(rows), sha256=digests)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of traces")
    main(parser.parse_args().folder)
