"""Run folders written without training."""

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.run.folder import write_json


def write_run(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = 40,
    finished: bool = True,
    settings: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    moves: bool = False,
) -> Path:
    """Write a run with four experts, restarted at step 12 if not `finished`, with a migration at step 20 if `moves`."""
    folder.mkdir(parents=True)
    config = {"recipe": "mnist_moe", "lr": 0.1, "seed": seed, "run_dir": str(folder), "replan": {"planner": None}}
    write_json(folder / "config.json", config | {"optimizer": {"beta1": 0.9}} | (settings or {}))
    lines: list[dict[str, Any]] = []
    for step in range(2, steps + 1, 2):
        line = {"step": step, "train/loss": 2 / step + seed, "train/accuracy": 1 - 1 / step}
        line["moe/load/block"] = [0.4, 0.3, 0.2, 0.1]
        if moves and step in (2, 20):
            line["moe/placement/block"] = [[0, 1], [2, 3]] if step == 2 else [[0, 3], [2, 1]]
        if moves and step == 20:
            line |= {"moe/migrated_experts": 2, "moe/migration_bytes": 3_000_000}
        if step % 20 == 0:
            line |= {"eval/loss": 1 / step, "eval/accuracy": 0.9}
        lines.append(line)
        if not finished and step == 12:
            lines.append({"step": step, "run/restarts": 1, "run/restart_reason": "rank 1 was killed"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        numbers = {"test_accuracy": 0.9 + 0.02 * seed, "samples_per_second": 100.0, "wall_seconds": 3.0}
        machine = {"world_size": 2 if moves else 1, "device": "cpu", "hardware": "Some CPU, 4 cores"}
        write_json(folder / "results.json", numbers | machine | (results or {}))
        (folder / "summary.txt").write_text("recipe  mnist_moe\n")
    return folder


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds of a run, runs with another learning rate and with migration, and an unfinished run with a restart."""
    runs = tmp_path_factory.mktemp("several") / "runs"
    return [
        write_run(runs / "first"),
        write_run(runs / "second", seed=1),
        write_run(runs / "fast", settings={"lr": 0.5}),
        write_run(runs / "moving", settings={"replan": {"planner": "swap"}}, moves=True),
        write_run(runs / "not <finished>", steps=24, finished=False),
    ]
