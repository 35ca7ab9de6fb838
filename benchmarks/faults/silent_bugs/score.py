"""Detection rate of `toolkit doctor` on silent bugs from public reports, and false alarms on the corrected scripts.

    python benchmarks/faults/silent_bugs/score.py                        a minute or two
    python benchmarks/faults/silent_bugs/score.py router_cut_off_by_gather  one bug; writes nothing

Each script in `bugs/` reproduces a publicly reported bug in at most forty lines on the CPU; the argument `corrected`
disables the bug. `Expected:` in its docstring is the finding that names it. The doctor compares one process with two
over three steps. Times exclude imports, which `toolkit doctor` repeats for each run.
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


def report_and_finding(name: str) -> tuple[str, str]:
    """Return the public thread of a bug and its expected finding."""
    text = (BUGS / f"{name}.py").read_text()
    thread, expected = re.search(r"\n(https://\S+)\nExpected: (.*)\.\n", text).groups()  # type: ignore[union-attr]
    return thread, expected


def watch_bug(folder: str, name: str, mode: str, variant: Variant) -> None:
    watch(Path(folder), STEPS, str(BUGS / f"{name}.py"), [mode], variant)


def findings(name: str, mode: str) -> list[str]:
    """Return the doctor's findings, likeliest cause first; an error of the script is a finding."""
    with tempfile.TemporaryDirectory(prefix="silent-bug-") as folder:

        def run(name_of_run: str, world: int, variant: Variant = "as it is") -> Evidence:
            records = Path(folder) / name_of_run
            records.mkdir()
            run_distributed(watch_bug, world, str(records), name, mode, variant)
            return Evidence(read_records(records))

        try:
            one = run("one process", 1)
            comparison, found = judge(one, run("two processes", 2), TOLERANCES[one.first.precision], run)
        except AssertionError as error:
            return [f"error: {str(error).splitlines()[-1]}"]
    return [finding.name for finding in found] or ([] if comparison.ok else ["differs"])


def score(name: str) -> dict[str, Any]:
    thread, expected = report_and_finding(name)
    started = time.monotonic()
    found = findings(name, "buggy")
    seconds = time.monotonic() - started
    row = {
        "bug": name,
        "found": bool(found),
        "named": found[:1] == [expected],
        "seconds": round(seconds),
        "false alarm": bool(findings(name, "corrected")),
        "finding": found[0] if found else "",
        "thread": thread,
    }
    print(f"{name}: {row['finding'] or 'not found'}", file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="BUG", help="only these bugs; writes nothing")
    args = parser.parse_args()
    rows = [score(name) for name in args.names or bugs()]
    total = {key: sum(row[key] for row in rows) for key in ("found", "named", "false alarm")}
    print(f"found {total['found']}, named {total['named']}, false alarms {total['false alarm']}, of {len(rows)}")
    if args.names:
        print("\n".join(f"{row['bug']}: {row['finding']}" for row in rows))
        return
    write_report("silent_bugs", rows, **total)


if __name__ == "__main__":
    main()
