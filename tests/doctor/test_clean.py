"""No alarm on recipes that are in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import ROOT, run_distributed
from toolkit.doctor.evidence import Evidence
from toolkit.doctor.examine import judge
from toolkit.doctor.record import read_records
from toolkit.doctor.watch import watch

RECIPE = ["debug", "--dataset", "digits", "--tracker", "none"]


def watch_script(folder: str, steps: int, script: str, args: list[str], rounding: float = 0.0) -> None:
    run_dir = ["--run-dir", f"{folder}/run"] if args else []
    watch(Path(folder), steps, str(ROOT / script), [*args, *run_dir], rounding)


@pytest.mark.parametrize(
    ("world", "args"),
    [
        (1, []),
        (2, ["--gradient-accumulation-steps", "2"]),
        (2, ["--parallel-strategy", "data_parallel"]),
        (2, ["--experts", "0", "--top-k", "1"]),
        (4, ["--ep-size", "2"]),
        (4, ["--balance", "bias"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_recipe_in_order_raises_no_alarm(world: int, args: list[str], tmp_path: Path):
    def run(name: str, processes: int, rounding: float = 0.0) -> Evidence:
        (tmp_path / name).mkdir()
        run_distributed(
            watch_script, processes, str(tmp_path / name), 3, "recipes/mnist_moe.py", [*RECIPE, *args], rounding
        )
        return Evidence(read_records(tmp_path / name))

    many = run("many", world)
    comparison, findings = judge(run("one", 1), many, 1e-6, run)
    assert comparison.steps == 3
    assert [check for check in comparison.checks if not check.ok] == []
    assert findings == []
    assert many.first.saved_by == "Trainer.save and restore"


def test_the_example_of_a_plain_loop_raises_no_alarm(tmp_path: Path):
    def run(name: str, processes: int, _: float = 0.0) -> Evidence:
        (tmp_path / name).mkdir()
        run_distributed(watch_script, processes, str(tmp_path / name), 3, "docs/examples/plain_accelerate.py", [])
        return Evidence(read_records(tmp_path / name))

    many = run("many", 2)
    comparison, findings = judge(run("one", 1), many, 1e-6, run)
    assert [check for check in comparison.checks if not check.ok] == []
    assert findings == []
    assert comparison["expert counts"] in comparison.checks
    assert many.first.saved_by == "ExpertParallel.save and load"
