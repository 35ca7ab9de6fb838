"""`toolkit lab`: replay recorded or synthetic routing against planners, and report imbalance and cost."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from toolkit.errors import EXIT_DONE, UserError
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.placement.planners import PLANNERS
from toolkit.experts.routing.traces import read_trace
from toolkit.lab.report import ASSUMED, STAY, Case, Rules, case_of_trace, case_of_workload, try_planner
from toolkit.lab.simulate import read_machine
from toolkit.lab.workloads import WORKLOADS, Sizes
from toolkit.run.arguments import Parser, count, positive
from toolkit.run.markdown import markdown_table
from toolkit.run.pictures.plots import draw_imbalances
from toolkit.version import __version__

USUAL = ["round_robin", "lpt", "swap", "few_swaps", "replicate"]
DECIMALS = {"MB moved": 2, "replica MB": 2, "planner ms": 2, "all-to-all MB": 2}


def main(argv: Sequence[str]) -> int:
    parser = Parser("toolkit lab", __doc__)
    parser.add_argument("trace", nargs="*", type=Path, help="files that --record-traces wrote; none: the workloads")
    parser.add_argument("--workloads", action="store_true", help="try W0 to W7, too")
    parser.add_argument("--planner", nargs="+", default=USUAL, choices=sorted(PLANNERS), help="the planners")
    parser.add_argument("--every", type=count, default=20, help="optimizer steps between plans")
    parser.add_argument("--ranks", type=count, help="ranks to spread experts over; traces: as many as in the run, W: 8")
    parser.add_argument("--spare-slots", type=int, default=0, help="empty slots per rank; replicate has at least one")
    parser.add_argument(
        "--initial-placement",
        choices=get_args(InitialPlacement),
        default="contiguous",
        help="experts at the start: in blocks of consecutive ids, or round-robin",
    )
    parser.add_argument("--machine", type=Path, help="JSON file with rates of a machine, to predict the time of steps")
    parser.add_argument("--ranks-per-node", type=count, help="ranks that share a node; all of them by default")
    parser.add_argument("--top-k", type=count, help="experts of a token, to predict the hierarchical exchange")
    parser.add_argument("--steps", type=count, default=400, help="of each workload")
    parser.add_argument("--seed", type=int, default=0, help="of the workloads")
    parser.add_argument("--seconds-per-row", type=positive, help="forward and backward of one assignment")
    parser.add_argument("--bytes-per-second", type=positive, help="of one rank's link, each way")
    parser.add_argument("--out", type=Path, help="folder for report.md, report.json and imbalance.png")
    args = parser.parse_args(argv)
    machine = read_machine(args.machine) if args.machine else ASSUMED
    rates = ("ranks_per_node", "top_k", "seconds_per_row", "bytes_per_second")
    given = {name: getattr(args, name) for name in rates}
    rules = Rules(
        every=args.every,
        spare_slots=args.spare_slots,
        initial_placement=args.initial_placement,
        machine=replace(machine, **{name: value for name, value in given.items() if value is not None}),
    )
    cases = _cases(args)
    rows = []
    for case in cases:
        rows.append(try_planner(case, STAY, guarded=False, rules=rules))
        rows += [
            try_planner(case, name, guarded=guarded, rules=rules) for name in args.planner for guarded in (False, True)
        ]
    report = _markdown(cases, rows, rules)
    sys.stdout.write(report)
    if args.out:
        _write(args.out, report, cases, rows, rules)
        sys.stdout.write(f"\nwritten to {args.out}\n")
    return EXIT_DONE


def _cases(args: argparse.Namespace) -> list[Case]:
    names = [path.parent.name if path.stem == "traces" else path.stem for path in args.trace]
    if len(set(names)) < len(names):
        names = [str(path) for path in args.trace]
    cases = [case_of_trace(name, read_trace(path), args.ranks) for name, path in zip(names, args.trace, strict=True)]
    if args.workloads or not cases:
        sizes = Sizes(steps=args.steps, ranks=args.ranks or 8, seed=args.seed)
        cases += [case_of_workload(name, sizes) for name in WORKLOADS]
    return cases


def _markdown(cases: Sequence[Case], rows: Sequence[dict[str, Any]], rules: Rules) -> str:
    """A table per case. `worst span` is time with plans over time without, in the worst span of two plans."""
    lines = [f"# Placement lab (toolkit {__version__}, a plan every {rules.every} steps)", ""]
    columns = [name for name in rows[0] if name not in ("case", "guarded", "series")]
    for case in cases:
        steps, layers, ranks, experts = case.load_TLSE.shape
        lines += [
            f"## {case.name}",
            "",
            f"{experts} experts on {ranks} ranks, {layers} layer(s), {steps} steps; seed {case.seed}, "
            f"SHA-256 {case.digest[:16]}",
            "",
        ]
        table = [columns]
        for row in rows:
            if row["case"] == case.name:
                cells = {**row, "planner": row["planner"] + (", guarded" if row["guarded"] else "")}
                table.append([_cell(name, cells[name]) for name in columns])
        lines.append(markdown_table(table))
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.{DECIMALS.get(name, 3)}f}"
    return "" if value is None else str(value)


def _write(folder: Path, report: str, cases: Sequence[Case], rows: Sequence[dict[str, Any]], rules: Rules) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}; give a folder that can be written.") from None
    (folder / "report.md").write_text(
        report + "\nImbalance over steps, with the guard:\n\n![Imbalance over steps](imbalance.png)\n"
    )
    facts = [
        {"case": case.name, "shape": case.load_TLSE.shape, "seed": case.seed, "sha256": case.digest} for case in cases
    ]
    figures = [{key: value for key, value in row.items() if key != "series"} for row in rows]
    record = {"toolkit": __version__, "rules": asdict(rules), "cases": facts, "rows": figures}
    (folder / "report.json").write_text(json.dumps(record, indent=2) + "\n")
    panels: dict[str, dict[str, list[float]]] = {case.name: {} for case in cases}
    for row in rows:
        if row["guarded"] or row["planner"] == STAY:
            panels[row["case"]][row["planner"]] = row["series"]
    draw_imbalances(folder / "imbalance.png", panels, first_step=rules.every)
