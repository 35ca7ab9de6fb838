"""How many public silent bugs the doctor finds and names, and how often it is alarmed by their corrected twins.

    python benchmarks/faults/silent_bugs/score.py                        a minute or two
    python benchmarks/faults/silent_bugs/score.py router_cut_off_by_gather  one of them, which is not written down
    python benchmarks/faults/silent_bugs/score.py --traincheck ENV/bin   TrainCheck instead (pip install traincheck), an
                                                                        hour; it goes on where it was stopped

Each script of `bugs/` makes a bug that a public thread reports anew, in at most forty lines of our own on the CPU;
with the argument `corrected`, it is not there. `Expected:` in its docstring is the finding that names it. The doctor
compares one process with two, over three steps. Seconds are those of its runs, in processes that have imported their
libraries; `toolkit doctor` imports them anew for each.

TrainCheck infers invariants from one run of the corrected twin on two processes (seed 0), and checks another run of the
twin and one of the bug (seed 1), five steps each: calls to torch, and the parameters after each step. Found: the bug
violates an invariant that the twin does not. What the twin violates are false alarms. That is the kindest setting: a
user has no corrected twin. It names no causes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from tests.support.helpers import run_distributed
from toolkit.doctor.compare import TOLERANCES, Evidence
from toolkit.doctor.examine import judge
from toolkit.doctor.record import read_records
from toolkit.doctor.watch import watch

BUGS = Path(__file__).parent / "bugs"
TIMEOUT_S = 3600.0
"""Of each of TrainCheck's programs, which take less than a minute on an idle machine."""
STEPS = 3
RUNS = {"reference": ["corrected", "0"], "twin": ["corrected", "1"], "bug": ["buggy", "1"]}
"""What TrainCheck traces: the arguments of the script."""
TRAINCHECK_COLUMNS = (
    "TrainCheck",
    "invariants",
    "violated by the bug",
    "violated by the twin",
    "violated by the bug alone",
    "seconds of TrainCheck",
)


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


# --- TrainCheck ------------------------------------------------------------------------------------------------------


def run_traincheck(name: str, programs: Path) -> dict[str, Any]:
    """Its verdict on one bug, or why it did not run; how many invariants it inferred, and how many of them the bug
    violates, its twin, and the bug alone; seconds."""
    started = time.monotonic()
    row: dict[str, Any] = dict.fromkeys(TRAINCHECK_COLUMNS)
    with tempfile.TemporaryDirectory(prefix="traincheck-") as folder:
        where = Path(folder)
        try:
            _collect(where, programs, name)
            _call(where, programs / "traincheck-infer", "-f", "reference", "-o", "invariants.json")
            inferred = len((where / "invariants.json").read_text().splitlines())
            violated = {}
            for run in ("bug", "twin"):
                words = ["-f", run, "-i", "invariants.json", "--no-html-report", "-o", f"checked-{run}"]
                _call(where, programs / "traincheck-check", *words)
                violated[run] = _violated(where / f"checked-{run}")
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            return row | {"TrainCheck": f"does not run: {_reason(where, error)}"}
    alone = violated["bug"] - violated["twin"]
    counts = (inferred, len(violated["bug"]), len(violated["twin"]), len(alone))
    verdict = "found" if alone else "not found"
    return dict(zip(TRAINCHECK_COLUMNS, (verdict, *counts, round(time.monotonic() - started)), strict=True))


def score_traincheck(names: list[str], programs: Path) -> None:
    """Adds to its record, after each bug. Those that the record has are not run again."""
    asked: list[str | Path] = [
        programs / "python",
        "-c",
        "from importlib.metadata import version; print(version('traincheck'))",
    ]
    version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    path = ROOT / "benchmarks" / "results" / "silent_bugs_traincheck.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in names:
        if any(row["bug"] == name for row in rows):
            continue
        rows.append({"bug": name, **run_traincheck(name, programs)})
        ran = [row for row in rows if row["invariants"] is not None]
        total = {
            "ran": len(ran),
            "found": sum(row["TrainCheck"] == "found" for row in ran),
            "falsely alarmed": sum(row["violated by the twin"] > 0 for row in ran),
        }
        write_report("silent_bugs_traincheck", rows, version=version, **total)


def _collect(where: Path, programs: Path, name: str) -> None:
    """The traces of three runs on two processes. All libraries are imported before TrainCheck wraps those of torch:
    calls that importing makes were nine tenths of a trace. And the optimizer is assigned without a type, or TrainCheck
    does not see that the parameters change."""
    runs = {str(where / out): words for out, words in RUNS.items()}
    for folder in runs:
        Path(folder).mkdir()
    begin = "accelerator, buggy = begin()"
    text = (BUGS / f"{name}.py").read_text().replace("optimizer: torch.optim.Optimizer = ", "optimizer = ")
    head = f"""import importlib, logging, sys
sys.path[:0] = {[str(ROOT), str(BUGS), str(BUGS.parent)]}
logging.disable(logging.INFO)
import ranks, small
importlib.import_module("torch._dynamo")
"""
    script = where / f"{name}.py"
    script.write_text(head + text.replace(begin, f"ranks.fork({runs})\n{begin}"))
    words: list[str | Path] = [
        "-p",
        script,
        "--models-to-track",
        "model",
        "--model-tracker-style",
        "sampler",
        "--output-dir",
        "all",
    ]
    _call(where, programs / "traincheck-collect", *words)


def _call(where: Path, *command: str | Path) -> None:
    settings = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=where, env=settings, check=True, capture_output=True, timeout=TIMEOUT_S)


def _reason(where: Path, error: Exception) -> str:
    """The program that failed, and the last line of what the traced script or the program itself said."""
    program = Path(str(getattr(error, "cmd", ["?"])[0])).name
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{program} took more than {TIMEOUT_S:.0f} s"
    outputs = sorted(where.glob("*/program_output.txt"), key=lambda path: path.stat().st_mtime)
    if program == "traincheck-collect" and outputs:
        said = outputs[-1].read_text().partition("\n\nProgram exited")[0]
    else:
        said = (getattr(error, "stderr", None) or b"").decode()
    return f"{program}: {(said.strip().splitlines() or [str(error)])[-1][:160]}"


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
    parser.add_argument("--traincheck", type=Path, metavar="FOLDER", help="score it instead: its programs, ENV/bin")
    args = parser.parse_args()
    if args.traincheck:
        score_traincheck(args.names or bugs(), args.traincheck)
        return
    rows = [score(name) for name in args.names or bugs()]
    total = {key: sum(row[key] for row in rows) for key in ("found", "named", "false alarm")}
    print(f"found {total['found']}, named {total['named']}, falsely alarmed {total['false alarm']} of {len(rows)}")
    if args.names:
        print("\n".join(f"{row['bug']}: {row['finding']}" for row in rows))
        return
    write_report("silent_bugs", rows, **total)


if __name__ == "__main__":
    main()
