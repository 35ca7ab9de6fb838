"""Balancing in each step, as UltraEP and SYMI do it, beside planners that plan every 20 steps, on recorded loads.

    python benchmarks/placement/record_traces.py FOLDER      twelve traces of two real runs, some ten minutes
    python benchmarks/placement/each_step.py FOLDER          the table, a minute or two

The loads are those of small models. So that weights weigh as much beside rows as in a large one, each is multiplied by
a whole number that gives a rank 8,192 rows in a step or a little more, and experts have 6 million parameters: bfloat16
weights, float32 moments and master weights, rows of 4 KiB each way, a microsecond per row, a link of 200 Gbit/s.
`borrow` plans for the step's own load, which is known after routing; `rebuild` for that of the step before, into slots
whose weights are sent anew in each step; the others for the last window, without the guard. One spare slot per rank for
`replicate`, `borrow` and `rebuild`. The time of planning is left out of all. Writes benchmarks/results/each_step.json.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.commands.lab.each_step import try_each_step
from toolkit.commands.lab.report import STAY, Case, Rules, case_of_trace, try_planner
from toolkit.commands.lab.traces import read_trace
from toolkit.experts.routing.metrics import RowBytes

RULES = Rules(every=20)
ROWS = 8192
EXPERT = 3 * 2048 * 1024
"""Parameters."""


def enlarged(case: Case) -> Case:
    """The same choices, more often, of larger experts."""
    layers = len(case.row_bytes)
    factor = int(np.ceil(ROWS / case.load_TLSE.sum(-1).mean()))
    return replace(
        case,
        load_TLSE=case.load_TLSE * factor,
        row_bytes=(RowBytes(4096, 4096),) * layers,
        weight_bytes=(2 * EXPERT,) * layers,
        optimizer_bytes=(12 * EXPERT,) * layers,
    )


def rows_of(case: Case) -> list[dict[str, Any]]:
    rows = []
    for name in (STAY, "lpt", "swap", "few_swaps", "replicate"):
        found = try_planner(case, name, guarded=False, rules=RULES)
        planned = len(case.load_TLSE) - RULES.every
        rows.append({**found, "MB a step": found["MB moved"] / planned + found["replica MB"]})
    rows += [try_each_step(case, kind, rules=RULES) for kind in ("borrow", "rebuild")]
    return [
        {
            "case": case.name,
            "planner": row["planner"],
            "imbalance": round(row["imbalance"], 3),
            "MB a step": round(row["MB a step"], 1),
            "step ms": round(row["step ms"], 2),
            "x stay": round(row["step ms"] / rows[0]["step ms"], 3),
        }
        for row in rows
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of traces")
    paths = sorted(parser.parse_args().folder.glob("*.npz"))
    cases = [case_of_trace(path.stem, read_trace(path)) for path in paths]
    digests = {case.name: case.digest for case in cases}
    write_report(
        "each_step", [row for case in cases for row in rows_of(enlarged(case))], every=RULES.every, sha256=digests
    )
