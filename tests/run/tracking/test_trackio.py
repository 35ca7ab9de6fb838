"""Trackio beside a run: read back from its database, also of a run that is continued. Each run is a process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT

PROGRAM = """
import sys
from pathlib import Path
from tests.run.tracking.toy import train
from toolkit.train.callbacks.base import Callback
from toolkit.run.config.run import RunConfig

class Break(Callback):
    def on_step_end(self, trainer):
        if trainer.state.step == 14:
            raise RuntimeError("broken")

broken = [Break()] if sys.argv[2] == "broken" else []
train(RunConfig(run_dir=Path(sys.argv[1]), tracker="trackio", cpu=True, log_every=2), *broken)
"""
READ = """
import json
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("toy")
found = [[run, SQLiteStorage.get_logs("toy", run), SQLiteStorage.get_run_config("toy", run)] for run in runs]
print("found " + json.dumps(found))
"""


def run(program: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`program` without a network, whose runs lie in `folder`."""
    unreachable = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))} | unreachable
    environment |= {"PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(folder / "trackio"), "OMP_NUM_THREADS": "1"}
    return run_forked("-c", program, *words, env=environment, timeout_s=120)


def test_trackio_gets_every_line_and_a_continued_run_goes_on(tmp_path: Path):
    pytest.importorskip("trackio")
    folder = tmp_path / "one"
    broken = run(PROGRAM, tmp_path, str(folder), "broken")
    assert "RuntimeError: broken" in broken.stderr
    done = run(PROGRAM, tmp_path, str(folder), "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Trackio: trackio show --project toy" in done.stdout
    other = run(PROGRAM, tmp_path, str(tmp_path / "other" / "one"), "whole")
    assert other.returncode == 0, other.stdout + other.stderr

    read = run(READ, tmp_path)
    (line,) = [line for line in read.stdout.splitlines() if line.startswith("found ")]
    found: list[Any] = json.loads(line.removeprefix("found "))
    assert len(found) == 2, "the run that was continued, and one of the same name elsewhere"
    for name, logs, config in found:
        assert name.startswith("toy one ")
        assert config["batch_size"] == 64
        assert config["optimizer.weight_decay"] == 0.01
        by_step = {log["step"]: log for log in logs if "train/loss" in log}
        assert sorted(by_step) == list(range(2, 21, 2))
        assert by_step[20]["moe/load/block/03"] == 0.1
        assert any("plots/loss" in log for log in logs)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    of_first = {log["step"]: log["train/loss"] for log in found[0][1] if "train/loss" in log}
    assert of_first == {line["step"]: line["train/loss"] for line in metrics}
