"""A floor under what every recipe learns: fails where one has become worse by a point since the record was made.

    python benchmarks/learning/quality.py                     every recipe, short runs, three minutes on two cores
    python benchmarks/learning/quality.py --only mnist_moe har
    python benchmarks/learning/quality.py --record            make the record anew, after a change that is meant

Each run is the recipe as a user starts it, on real data of $TOOLKIT_DATA_DIR or on text that every Python has, with one
seed. A point is a hundredth of the accuracy, or two hundredths of the bits per byte. Runs differ between processors in
the last bits, and by that less than a point: the record's `other kernels` are those of `make test KERNELS=default`.

Writes benchmarks/results/quality.json with --record; exit code 1 where a run is worse.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report

RECORD = ROOT / "benchmarks" / "results" / "quality.json"
OTHER_KERNELS = {
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
}


class Case(NamedTuple):
    """A short run, and the result by which it is judged."""

    words: str
    result: str = "test_accuracy"

    @property
    def point(self) -> float:
        """What the result may be worse by; negative where less of it is better."""
        return 0.01 if self.result == "test_accuracy" else -0.02


CASES = {
    "mnist_moe": Case("full --epochs 1"),
    "lm_moe": Case("full --max-steps 200", "test_bits_per_byte"),
    "finetune_moe": Case("debug --max-steps 60", "test_bits_per_byte"),
    "har": Case("full --epochs 6"),
    "lmu_speech": Case("fsdd --target digits --epochs 4"),
    "psmnist": Case("parallel --epochs 1"),
    "few_labels": Case("supervised --epochs 1"),
    "vae_robustness": Case("full --epochs 1"),
}


def run(recipe: str, case: Case, environment: dict[str, str]) -> tuple[float, float]:
    """The result, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        rest = ["--cpu", "--seed", "0", "--tracker", "none", "--run-dir", f"{folder}/run"]
        command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *case.words.split(), *rest]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | environment)
        seconds = time.perf_counter() - began
        results = json.loads((Path(folder) / "run" / "results.json").read_text())
    return float(results[case.result]), seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--record", action="store_true", help="of every recipe")
    options = parser.parse_args()
    if options.record:
        rows: list[dict[str, Any]] = []
        for recipe, case in CASES.items():
            value, seconds = run(recipe, case, {})
            other, _ = run(recipe, case, OTHER_KERNELS)
            row = {"recipe": recipe, "run": case.words, "result": case.result, "value": round(value, 4)}
            rows.append(row | {"other kernels": round(other, 4), "seconds": round(seconds)})
        write_report("quality", rows)
        return 0
    recorded = {row["recipe"]: row for row in json.loads(RECORD.read_text())["rows"]}
    worse = False
    for recipe in options.only:
        case, row = CASES[recipe], recorded[recipe]
        if (row["run"], row["result"]) != (case.words, case.result):
            print(f"{recipe}: the record is of another run: make it anew with --record.", file=sys.stderr)
            return 2
        value, seconds = run(recipe, case, {})
        floor = row["value"] - case.point
        fell = value < floor if case.point > 0 else value > floor
        worse |= fell
        verdict = "WORSE" if fell else "ok"
        print(
            f"{recipe}: {case.result} {value:.4f}, recorded {row['value']:.4f}, {seconds:.0f} s: {verdict}", flush=True
        )
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
