"""`toolkit lab`: replay recorded or synthetic routing against planners, and report imbalance and cost."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

from toolkit.errors import EXIT_DONE, reading
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.placement.planners import find_planner
from toolkit.experts.routing.traces import read_trace
from toolkit.lab.recorded import is_of_other_program, read_recorded
from toolkit.lab.replay import (
    ASSUMED,
    STAY,
    Case,
    Rules,
    case_of_recorded,
    case_of_trace,
    case_of_workload,
    try_planner,
)
from toolkit.lab.simulate import Machine
from toolkit.lab.workloads import WORKLOADS, Sizes
from toolkit.progress_bar import progress
from toolkit.run.arguments import Parser, count, regular_file
from toolkit.run.markdown import markdown_table
from toolkit.run.pictures.plots import draw_imbalances, save_figure
from toolkit.version import __version__

USUAL = ["round_robin", "lpt", "swap", "replicate"]
LEAST_SAVED = 0.01
"""Share of the predicted step time below which placement makes no difference."""
UNEVEN = 1.1
"""Imbalance under the best plans from which spare slots are worth a try."""
DECIMALS = {"MB moved": 2, "replica MB": 2, "planner ms": 2}


def main(argv: Sequence[str]) -> int:
    parser = Parser("toolkit lab", __doc__)
    parser.add_argument(
        "trace",
        nargs="*",
        type=regular_file,
        help="files of --record-traces, or of SGLang (.pt), vLLM (.npz), Megatron-LM (.jsonl) and EPLB (.npy). "
        "Default: synthetic loads W0 to W7",
    )
    parser.add_argument("--planner", nargs="+", default=USUAL, help="names of planners, or module:function")
    parser.add_argument("--every", type=count, default=20, help="optimizer steps between plans. Default: 20")
    parser.add_argument("--ranks", type=count, help="ranks of the EP group (default: as in the run, 8 for W0 to W7)")
    parser.add_argument("--spare-slots", type=int, default=0, help="empty slots per rank. Default: 0, 1 for replicate")
    parser.add_argument(
        "--initial-placement",
        choices=get_args(InitialPlacement),
        default="contiguous",
        help="placement of the first window. Default: contiguous",
    )
    parser.add_argument("--machine", type=regular_file, help="JSON file with the rates of a machine")
    parser.add_argument("--out", type=Path, help="folder for report.md, report.json and imbalance.png")
    args = parser.parse_args(argv)
    sys.path.append("")  # modules of planners in the current folder
    for name in args.planner:
        find_planner(name)
    rules = Rules(
        every=args.every,
        spare_slots=args.spare_slots,
        initial_placement=args.initial_placement,
        machine=_read_machine(args.machine) if args.machine else ASSUMED,
    )
    cases = _cases(args)
    tries = [(STAY, False), *((name, guarded) for name in args.planner for guarded in (False, True))]
    replays = progress(list(product(cases, tries)), "replaying")
    rows = [try_planner(case, name, guarded=guarded, rules=rules) for case, (name, guarded) in replays]
    report = _markdown(cases, rows, rules)
    sys.stdout.write(report)
    if args.out:
        _write(args.out, report, cases, rows, rules)
        sys.stdout.write(f"\nwritten to {args.out}\n")
    return EXIT_DONE


def _read_machine(path: Path) -> Machine:
    with reading(path, "Give the rates as JSON."):
        return Machine(**json.loads(path.read_text(encoding="utf-8")))


def _cases(args: argparse.Namespace) -> list[Case]:
    if not args.trace:
        return [case_of_workload(name, Sizes(steps=400, ranks=args.ranks or 8)) for name in WORKLOADS]
    names = [path.parent.name if path.stem == "traces" else path.stem for path in args.trace]
    if len(set(names)) < len(names):
        names = [str(path) for path in args.trace]
    cases = []
    for name, path in zip(names, args.trace, strict=True):
        with reading(path, "Give a recorded trace."):
            if is_of_other_program(path):
                cases.append(case_of_recorded(name, read_recorded(path), args.ranks, args.every))
            else:
                cases.append(case_of_trace(name, read_trace(path), args.ranks))
    return cases


def _markdown(cases: Sequence[Case], rows: Sequence[dict[str, Any]], rules: Rules) -> str:
    """Return a table per case."""
    lines = [f"# Placement lab (toolkit {__version__}, a plan every {rules.every} steps)", ""]
    columns = [name for name in rows[0] if name not in ("case", "guarded", "series")]
    for case in cases:
        steps, layers, ranks, experts = case.loads.shape
        sizes = f"{experts} experts on {ranks} ranks, {layers} layer(s), {steps} steps"
        lines += [f"## {case.name}", "", f"{sizes}; seed {case.seed!r}, SHA-256 {case.digest[:16]}", ""]
        table = [columns]
        of_case = [row for row in rows if row["case"] == case.name]
        for row in of_case:
            cells = {**row, "planner": row["planner"] + (", guarded" if row["guarded"] else "")}
            table.append([_cell(name, cells[name]) for name in columns])
        lines += [markdown_table(table), _advice(of_case, rules), ""]
    return "\n".join(lines)


def _advice(rows: Sequence[dict[str, Any]], rules: Rules) -> str:
    """Say whether to turn rebalancing on, how, and what it saves."""
    stay = next(row["step ms"] for row in rows if row["planner"] == STAY)
    # Of planners that differ by less than a hundredth of a step, the guarded ones come first.
    best = min(
        (row for row in rows if row["planner"] != STAY),
        key=lambda row: (round(row["step ms"] / stay, 2), not row["guarded"], row["step ms"]),
    )
    saved = 1 - best["step ms"] / stay
    if saved < LEAST_SAVED:
        return f"Leave rebalancing off: no planner saves {LEAST_SAVED:.0%} of the predicted step time."
    saves = f"saves {saved:.0%} of the predicted step time."
    if best["planner"] in get_args(InitialPlacement):
        return f"Leave rebalancing off: `--initial-placement {best['planner']}` {saves}"
    spare = max(rules.spare_slots, int(best["planner"] == "replicate"))
    options = ["" if best["guarded"] else " --replan.no-guarded", f" --spare-slots {spare}" if spare else ""]
    advice = f"Turn rebalancing on: `--replan.planner {best['planner']} --replan.every {rules.every}{''.join(options)}`"
    more = f" An imbalance of {best['imbalance']:.2f} remains: replay with `--spare-slots 1`."
    return f"{advice} {saves}{'' if spare or best['imbalance'] < UNEVEN else more}"


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.{DECIMALS.get(name, 3)}f}"
    return "" if value is None else str(value)


def _write(folder: Path, report: str, cases: Sequence[Case], rows: Sequence[dict[str, Any]], rules: Rules) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(f"{report}\nImbalance over steps, with the guard:\n\n![](imbalance.png)\n")
    facts = [{"case": case.name, "shape": case.loads.shape, "seed": case.seed, "sha256": case.digest} for case in cases]
    figures = [{key: value for key, value in row.items() if key != "series"} for row in rows]
    settings = {**asdict(rules), "machine": rules.machine.model_dump()}
    record = {"toolkit": __version__, "rules": settings, "cases": facts, "rows": figures}
    (folder / "report.json").write_text(json.dumps(record, indent=2) + "\n")
    panels: dict[str, dict[str, list[float]]] = {case.name: {} for case in cases}
    for row in rows:
        if row["guarded"] or row["planner"] == STAY:
            panels[row["case"]][row["planner"]] = row["series"]
    save_figure(folder / "imbalance.png", partial(draw_imbalances, panels=panels, first_step=rules.every))
