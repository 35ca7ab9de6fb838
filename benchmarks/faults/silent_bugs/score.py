"""How many public silent bugs the doctor finds and names, and how often it is alarmed by their corrected twins.

    python benchmarks/faults/silent_bugs/score.py                        a minute or two
    python benchmarks/faults/silent_bugs/score.py router_cut_off_by_gather  one of them, which is not written down

Each script of `bugs/` makes a bug that a public thread reports anew, in at most forty lines of our own on the CPU;
with the argument `corrected`, it is not there. `Expected:` in its docstring is the finding that names it. The doctor
compares one process with two, over three steps. Seconds are those of its runs, in processes that have imported their
libraries; `toolkit doctor` imports them anew for each.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from benchmarks.support.processes import run_distributed
from toolkit.doctor.compare import TOLERANCES, Evidence
from toolkit.doctor.examine import judge
from toolkit.doctor.record import read_records
from toolkit.doctor.recorder import Variant
from toolkit.doctor.watch import watch

BUGS = Path(__file__).parent / "bugs"
STEPS = 3


def bugs() -> list[str]:
    return sorted(path.stem for path in BUGS.glob("*.py") if path.stem != "small")


def about(name: str) -> tuple[str, str]:
    """The thread that reports a bug, and the finding that names it."""
    text = (BUGS / f"{name}.py").read_text()
    thread, expected = re.search(r"\n(https://\S+)\nExpected: (.*)\.\n", text).groups()  # type: ignore[union-attr]
    return thread, expected


def watch_bug(folder: str, name: str, twin: str, variant: Variant) -> None:
    """In each rank."""
    watch(Path(folder), STEPS, str(BUGS / f"{name}.py"), [twin], variant)


def findings(name: str, twin: str) -> list[str]:
    """What the doctor says, likeliest cause first; an error of the script is one, too."""
    with tempfile.TemporaryDirectory(prefix="silent-bug-") as folder:

        def run(of: str, world: int, variant: Variant = "as it is") -> Evidence:
            where = Path(folder) / of
            where.mkdir()
            run_distributed(watch_bug, world, str(where), name, twin, variant)
            return Evidence(read_records(where))

        try:
            one = run("alone", 1)
            comparison, found = judge(one, run("together", 2), TOLERANCES[one.first.precision], run)
        except AssertionError as error:
            return [f"refused: {str(error).splitlines()[-1]}"]
    return [finding.name for finding in found] or ([] if comparison.ok else ["differs"])


def score(name: str) -> dict[str, Any]:
    thread, expected = about(name)
    started = time.monotonic()
    said = findings(name, "buggy")
    seconds = time.monotonic() - started
    row = {
        "bug": name,
        "found": bool(said),
        "named": said[:1] == [expected],
        "seconds": round(seconds),
        "false alarm": bool(findings(name, "corrected")),
        "finding": said[0] if said else "",
        "thread": thread,
    }
    print(f"{name}: {row['finding'] or 'not found'}", file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="BUG", help="these alone, and nothing is written down")
    args = parser.parse_args()
    rows = [score(name) for name in args.names or bugs()]
    total = {key: sum(row[key] for row in rows) for key in ("found", "named", "false alarm")}
    print(f"found {total['found']}, named {total['named']}, falsely alarmed {total['false alarm']} of {len(rows)}")
    if args.names:
        print("\n".join(f"{row['bug']}: {row['finding']}" for row in rows))
        return
    write_report("silent_bugs", rows, **total)


if __name__ == "__main__":
    main()
