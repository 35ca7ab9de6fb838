"""The recipe har: it resumes, does the same on two processes, and counts each held-out window once on any number."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import toolkit as tk
from activity.activity import load_activity
from activity.voting import VotedClassification
from recipes import har
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import ROOT, run_distributed
from tests.support.preempted import preempted_at
from toolkit.data.batches import EvalBatches
from toolkit.errors import UserError
from toolkit.run import cli
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.metrics import MetricSums

STOP_AT = 8


def config(folder: Path, run: str, **changes: Any) -> har.Config:
    return har.debug().replace(run_dir=folder / run, tracker="none", cpu=True, **changes)


def train(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Each of `runs`, by name; the one that is called "stopped" is stopped by a signal, and continued."""
    os.environ["TOOLKIT_CACHE_DIR"] = str(folder / "cache")
    for name, changes in runs.items():
        if name == "stopped":
            with in_float64(), preempted_at(STOP_AT):
                har.main(config(folder, name, **changes))
        with in_float64():
            har.main(config(folder, name, **changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of: "one" process; "two"; "stopped" and continued; "frozen", whose encoder is that of "one"."""
    folder = tmp_path_factory.mktemp("har")
    encoder = folder / "one" / "checkpoints" / "step-00000044" / "model.safetensors"
    frozen = {"encoder_path": encoder, "freeze_encoder": True, "class_balance": "sqrt", "hidden_dims": (8,)}
    frozen |= {"scale_lr": 32, "schedule": tk.ScheduleOptions(warmup_epochs=1)}
    run_distributed(train, 1, folder, {"one": {}, "frozen": frozen})
    run_distributed(train, 2, folder, {"two": {}, "stopped": {}})
    return folder


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


def test_two_processes_do_what_one_does(runs):
    for mine, theirs in zip(metrics(runs / "two"), metrics(runs / "one"), strict=True):
        for loss in {"train/loss", "eval/loss"} & theirs.keys():
            assert mine[loss] == pytest.approx(theirs[loss], rel=IN_FLOAT64)
        assert mine.get("eval/confusion") == theirs.get("eval/confusion")
        assert mine.get("eval/macro_f1") == theirs.get("eval/macro_f1")
    assert results(runs / "one")["test_accuracy"] > 0.8


def test_a_stopped_run_goes_on_as_if_it_had_not_been(runs):
    assert metrics(runs / "stopped") == metrics(runs / "two")
    weights = [runs / run / "checkpoints" / "step-00000044" / "model.safetensors" for run in ("stopped", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_frozen_encoder_stays_and_the_classifier_learns(runs):
    from safetensors.torch import load_file

    one, frozen = (
        load_file(runs / run / "checkpoints" / "step-00000044" / "model.safetensors") for run in ("one", "frozen")
    )
    encoder = [name for name in one if name.startswith("encoder.")]
    assert encoder
    assert all(torch.equal(one[name], frozen[name]) for name in encoder)
    losses = [line["train/loss"] for line in metrics(runs / "frozen")]
    assert losses[-1] < losses[0]


def test_the_results_say_on_what_and_how_it_was_judged(runs):
    numbers = results(runs / "frozen")
    assert numbers["dataset_notice"] == "Made-up volunteers say nothing about people."
    assert numbers["held_out_volunteers"] == ["made-up-04", "made-up-09"]
    assert (numbers["class_balance"], numbers["frozen"], numbers["mode"]) == ("sqrt", True, "all_channels")
    assert set(numbers["class_counts"]) == set(numbers["classes"])
    summary = (runs / "frozen" / "summary.txt").read_text()
    assert "macro-F1" in summary
    assert "Made-up volunteers" in summary
    with Image.open(runs / "frozen" / "confusion.png") as picture:
        assert picture.width > 300


def test_a_rate_that_is_meant_for_half_the_batch_is_doubled_and_warms_up(runs):
    assert (results(runs / "one")["effective_batch_size"], results(runs / "one")["peak_learning_rate"]) == (64, 4e-3)
    numbers = results(runs / "frozen")
    assert (numbers["effective_batch_size"], numbers["peak_learning_rate"]) == (64, 8e-3)
    # 11 steps of warm-up; the line of step 5 has the rate of the fifth.
    assert metrics(runs / "frozen")[0]["train/learning_rate"] == pytest.approx(8e-3 * 5 / 12)


def evaluate(cache: Path, mode: str) -> dict[str, Any]:
    """An untrained model on the held-out windows, in batches that no number of ranks divides."""
    os.environ["TOOLKIT_CACHE_DIR"] = str(cache)
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _distributed() else (0, 1)
    data = load_activity("generated", None, on_main=lambda decide: decide())
    torch.manual_seed(0)
    model = har.build_model(har.debug().replace(mode=mode), data).eval()
    sums, task = MetricSums(torch.device("cpu")), VotedClassification()
    with torch.no_grad():
        for batch in EvalBatches(data.test, batch_size=37, rank=rank, world_size=world):
            loss = task.evaluate(model, batch)
            sums.add({"loss": loss.sum, **loss.sums}, loss.count)
    summary = task.summarise(sums.compute())
    counts = (len(data.test) * torch.tensor(summary["confusion"], dtype=torch.float64)).round()
    labels = data.test.columns["label"].bincount(minlength=len(data.classes))
    return {**summary, "rows": counts.sum(1).int().tolist(), "labels": labels.tolist()}


def _distributed() -> bool:
    return torch.distributed.is_initialized()


def test_an_evaluation_counts_every_window_once_on_one_and_four_processes(runs):
    (alone,) = run_distributed(evaluate, 1, runs / "cache", "flatten")
    assert alone["rows"] == alone["labels"]
    for summary in run_distributed(evaluate, 4, runs / "cache", "flatten"):
        assert summary == {**alone, "loss": pytest.approx(alone["loss"], rel=1e-5)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fold": 5}, "fold=5: take 0 to 4"),
        ({"freeze_encoder": True}, "freeze_encoder=True: say which encoder with encoder_path"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        har.full().replace(**changes)


def batch_table() -> list[list[str]]:
    """The cells of the table of batches in docs/recipes/har.md."""
    section = (
        (ROOT / "docs" / "recipes" / "har.md").read_text().partition("## Multi-GPU training")[2].partition("\n## ")[0]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert {row[0] for row in rows[2:]} == {"1", "2", "4", "8"}
    return rows[2:]


@pytest.mark.parametrize("row", batch_table(), ids=lambda row: f"{row[0]}x{row[1]}x{row[2]}")
def test_the_table_of_batches_is_what_its_flags_do(row):
    gpus, per_gpu, accumulation, effective, rate, warmup, flags = row
    config = cli.parse(har.PRESETS, flags.strip("`").split())
    assert (config.num_processes or 1, config.gradient_accumulation_steps) == (int(gpus), int(accumulation))
    assert config.batch_size == int(effective) == int(gpus) * int(per_gpu) * int(accumulation)
    assert config.peak_lr == pytest.approx(float(rate))
    assert config.schedule.warmup_epochs == float(warmup)
