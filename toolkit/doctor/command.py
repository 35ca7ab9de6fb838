"""`toolkit doctor`: compare training in one process with training in several, and name the cause of a difference.

Without a script it reports on this machine, with an all-reduce over --num-processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import EXIT_BUG, EXIT_DONE
from toolkit.run.arguments import Parser, count, positive, regular_file
from toolkit.run.console import log_line


def main(argv: Sequence[str]) -> int:
    """Return 0 if all is equal, 1 if something differs, 2 for bad input."""
    parser = Parser("toolkit doctor", __doc__)
    parser.add_argument(
        "--processes",
        "--num-processes",
        type=count,
        metavar="N",
        help="how many are compared with one (2), or do the all-reduce (1)",
    )
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="optimizer steps of each run (3)")
    parser.add_argument(
        "--tolerance", type=positive, metavar="X", help="relative difference that is taken for rounding (by precision)"
    )
    parser.add_argument("--timeout", type=positive, default=600, metavar="SECONDS", help="for each run (600)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON, too")
    parser.add_argument(
        "script",
        type=regular_file,
        nargs="?",
        help="a recipe, or a script that trains with Accelerate; none: report on this machine",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args(argv)

    if args.script is None:
        from toolkit.doctor.machine import report_machine
        from toolkit.run.config.run import RunConfig

        world = args.processes or 1
        return report_machine(RunConfig(num_processes=world, batch_size=world, process_timeout=args.timeout / 60))

    from toolkit.doctor.examine import examine

    report = examine(
        args.script,
        args.arguments,
        processes=args.processes or 2,
        steps=args.steps,
        tolerance=args.tolerance,
        timeout_s=args.timeout,
        log=log_line,
    )
    if args.out is not None:
        args.out.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{report}")
    return EXIT_DONE if report.ok else EXIT_BUG
