"""How many public silent bugs the doctor finds and names, and how often it is alarmed by their corrected twins.

    python benchmarks/silent_bugs/score.py                              a minute or two
    python benchmarks/silent_bugs/score.py router_cut_off_by_gather     one of them, which is not written down
    python benchmarks/silent_bugs/score.py --traincheck ENV/bin         TrainCheck too (pip install traincheck)

Each script of `bugs/` makes a bug that a public thread reports anew, in at most forty lines of our own on the CPU;
with the argument `corrected`, it is not there. `Expected:` in its docstring is the finding that names it. The doctor
compares one process with two, over three steps. Seconds are those of its runs, in processes that have imported their
libraries; `toolkit doctor` imports them anew for each.

TrainCheck learns invariants from a corrected twin on two processes, and then checks the same script with the bug:
found, where an invariant is violated that the corrected twin, run again, does not violate. That is the kindest setting:
a user has no corrected twin. It names no causes. A script that it does not get through did not run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from tests.helpers import run_distributed
from toolkit.doctor.compare import TOLERANCES
from toolkit.doctor.evidence import Evidence
from toolkit.doctor.examine import judge
from toolkit.doctor.record import read_records
from toolkit.doctor.watch import watch
from toolkit.launch.port import bound_port, reserve_port

BUGS = Path(__file__).parent / "bugs"
TIMEOUT_S = 300.0
STEPS = 3


def bugs() -> list[str]:
    return sorted(path.stem for path in BUGS.glob("*.py") if path.stem != "small")


def about(name: str) -> tuple[str, str]:
    """The thread that reports a bug, and the finding that names it."""
    text = (BUGS / f"{name}.py").read_text()
    thread, expected = re.search(r"\n(https://\S+)\nExpected: (.*)\.\n", text).groups()  # type: ignore[union-attr]
    return thread, expected


def watch_bug(folder: str, name: str, variant: str, rounding: float) -> None:
    """In each rank."""
    watch(Path(folder), STEPS, str(BUGS / f"{name}.py"), [variant], rounding)


def findings(name: str, variant: str) -> list[str]:
    """What the doctor says, likeliest cause first; an error of the script is one, too."""
    with tempfile.TemporaryDirectory(prefix="silent-bug-") as folder:

        def run(of: str, world: int, rounding: float = 0.0) -> Evidence:
            where = Path(folder) / of
            where.mkdir()
            run_distributed(watch_bug, world, str(where), name, variant, rounding)
            return Evidence(read_records(where))

        try:
            one = run("alone", 1)
            comparison, found = judge(one, run("together", 2), TOLERANCES[one.first.precision], run)
        except AssertionError as error:
            return [f"refused: {str(error).splitlines()[-1]}"]
    return [finding.name for finding in found] or ([] if comparison.ok else ["differs"])


def score(name: str, traincheck: Path | None) -> dict[str, Any]:
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
        "TrainCheck": "did not run" if traincheck is None else run_traincheck(name, traincheck),
        "thread": thread,
    }
    print(f"{name}: {row['finding'] or 'not found'}", file=sys.stderr, flush=True)
    return row


# --- TrainCheck ------------------------------------------------------------------------------------------------------


def run_traincheck(name: str, programs: Path) -> str:
    """`found`, `not found`, `false alarm` (of the twin as well), or why it did not run."""
    with tempfile.TemporaryDirectory(prefix="traincheck-") as folder:
        where = Path(folder)
        try:
            _collect(where, programs, name, "corrected", "reference")
            _call(where, programs / "traincheck-infer", "-f", "reference", "-o", "invariants.json")
            violated = []
            for variant in ("buggy", "corrected"):
                _collect(where, programs, name, variant, variant)
                words = ["-f", variant, "-i", "invariants.json", "--no-html-report", "-o", f"checked-{variant}"]
                _call(where, programs / "traincheck-check", *words)
                violated.append(_violated(where / f"checked-{variant}"))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            return f"did not run: {type(error).__name__} of {Path(str(getattr(error, 'cmd', ['?'])[0])).name}"
    if violated[0] - violated[1]:
        return "found" if not violated[1] else "found, false alarm"
    return "not found" if not violated[1] else "not found, false alarm"


def _collect(where: Path, programs: Path, name: str, variant: str, out: str) -> None:
    """The trace of a script on two processes."""
    script = where / f"{name}.py"
    script.write_text((BUGS / f"{name}.py").read_text())
    reserved = reserve_port()
    start = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={bound_port(reserved)} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
    lines = [f"RANK={r} LOCAL_RANK={r} {start} {programs / 'python'} {script} {variant} &" for r in range(2)]
    (where / "run.sh").write_text("\n".join([*lines, "wait", ""]))
    words = ["-p", str(script), "-s", str(where / "run.sh"), "--models-to-track", "model", "--no-auto-var-instr"]
    try:
        _call(where, programs / "traincheck-collect", *words, "--output-dir", out)
    finally:
        reserved.close()


def _call(where: Path, *command: str | Path) -> None:
    settings = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=where, env=settings, check=True, capture_output=True, timeout=TIMEOUT_S)


def _violated(folder: Path) -> set[str]:
    """The invariants that TrainCheck lists as failed."""
    failed = set()
    for path in folder.rglob("failed*.log"):
        failed |= {json.dumps(item["invariant"], sort_keys=True) for item in _json_items(path.read_text())}
    return failed


def _json_items(text: str) -> list[Any]:
    decoder, items, at = json.JSONDecoder(), [], 0
    while (start := text.find("{", at)) >= 0:
        item, at = decoder.raw_decode(text, start)
        items.append(item)
    return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="BUG", help="these alone, and nothing is written down")
    parser.add_argument("--traincheck", type=Path, metavar="FOLDER", help="where its programs are: ENV/bin")
    args = parser.parse_args()
    rows = [score(name, args.traincheck) for name in args.names or bugs()]
    total = {key: sum(row[key] for row in rows) for key in ("found", "named", "false alarm")}
    print(f"found {total['found']}, named {total['named']}, falsely alarmed {total['false alarm']} of {len(rows)}")
    if args.names:
        print("\n".join(f"{row['bug']}: {row['finding']} ({row['TrainCheck']})" for row in rows))
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    facts = {package: importlib.metadata.version(package) for package in ("accelerate", "transformers")}
    command = " ".join(["python", str(Path(sys.argv[0])), *sys.argv[1:]])
    write_report("silent_bugs", rows, command=command, commit=commit.strip(), **facts, **total)


if __name__ == "__main__":
    main()
