"""Regression test of the quality of every recipe: a short run of each, compared with a floor.

    python benchmarks/learning/quality.py --data-dir DIR             minutes; exit code 1 if a run misses its floor
    python benchmarks/learning/quality.py --data-dir DIR --floors    write new floors after an intended change

A floor is the reference result minus one percentage point (plus 0.05 bits per byte). Only `--floors` writes floors, to
benchmarks/results/quality.json. The runs are much shorter than the published runs, on one process and thread, with one
seed: they detect regressions and do not measure quality. On another type of processor a seed can differ by a point:
write floors there before a change.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import markdown, write_report
from benchmarks.support.processes import run_recipe

RECORD = ROOT / "benchmarks" / "results" / "quality.json"
POINT, BITS = 0.01, 0.05


@dataclass(frozen=True)
class Case:
    recipe: str
    flags: str
    metric: str
    """Key of results.json; lower is better only for bits per byte."""

    @property
    def lower_is_better(self) -> bool:
        return self.metric.endswith("bits_per_byte")

    def floor(self, value: float) -> float:
        """Return the worst acceptable value for the reference `value`."""
        return round(value + BITS, 3) if self.lower_is_better else round(value - POINT, 4)

    def holds(self, value: float, floor: float) -> bool:
        return value <= floor if self.lower_is_better else value >= floor


CASES = [
    Case("mnist_moe", "full --epochs 1", "test_accuracy"),
    Case("lm_moe", "full --max-steps 200", "test_bits_per_byte"),
    Case("finetune_moe", "debug --max-steps 60", "test_bits_per_byte"),
    Case("har", "full --epochs 6", "test_accuracy"),
    Case("lmu_speech", "fsdd --target digits --epochs 4", "test_accuracy"),
    Case("psmnist", "parallel --epochs 1", "test_accuracy"),
    Case("few_labels", "supervised --epochs 1", "test_accuracy"),
    Case("vae_robustness", "full --epochs 1", "test_accuracy"),
]


def run(case: Case, data_dir: Path) -> dict[str, Any]:
    """Run a case, and return its result and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{case.flags} --run-dir {folder}/run --cpu --num-processes 1 --tracker none".split()
        start = time.perf_counter()
        done = run_recipe(case.recipe, *flags, env={"OMP_NUM_THREADS": "1", "TOOLKIT_DATA_DIR": str(data_dir)})
        assert done.returncode == 0, done.stderr[-2000:]
        value = json.loads(Path(folder, "run", "results.json").read_text())[case.metric]
        return {
            "recipe": case.recipe,
            "run": case.flags,
            "metric": case.metric.removeprefix("test_").replace("_", " "),
            "value": round(value, 4),
            "seconds": round(time.perf_counter() - start, 1),
        }


def judge(rows: Sequence[Mapping[str, Any]], floors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Add to each row its floor and whether it holds."""
    return [
        {**row, "floor": floors[row["recipe"]], "holds": case.holds(row["value"], floors[row["recipe"]])}
        for case, row in zip(CASES, rows, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--floors", action="store_true", help="write new floors from the results")
    options = parser.parse_args()
    rows = [run(case, options.data_dir) for case in CASES]
    if options.floors:
        floors = {case.recipe: case.floor(row["value"]) for case, row in zip(CASES, rows, strict=True)}
        write_report("quality", judge(rows, floors))
        return 0
    recorded = json.loads(RECORD.read_text())["rows"]
    judged = judge(rows, {row["recipe"]: row["floor"] for row in recorded})
    print(markdown(judged))
    return 0 if all(row["holds"] for row in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
