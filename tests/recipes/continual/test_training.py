"""Whole runs over a small stream, on one process and on several, whole and continued."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import toolkit as tk
from continual.training import ClassificationWithinTasks
from tests.recipes.continual.toy import dimmed, toy_config, toy_trainer
from tests.support.equality import in_float64
from tests.support.helpers import run_distributed
from toolkit.data.table import Batch
from toolkit.dynamic.remember import Replay
from toolkit.run.config.callback_options import CheckpointOptions, EarlyStoppingOptions
from toolkit.run.tracking.jsonl import read_metrics

METHODS: dict[str, dict[str, Any]] = {
    "elastic": {"strength": 1e3},
    "replay": {"capacity": 20},
    "augmented replay": {"capacity": 20, "augment": dimmed},
}

OF_THE_MACHINE = {"samples_per_second", "train_seconds", "peak_memory_bytes"}


class StopAfter(tk.Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer: tk.Trainer) -> None:
        if trainer.state.step == self.step:
            raise RuntimeError("out of luck")


def train(config: tk.RunConfig, *callbacks: tk.Callback, **method: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results, and weights, of one run."""
    with toy_trainer(config, *callbacks, **method) as trainer:
        results = trainer.fit()
        state = {name: value.clone() for name, value in trainer.raw_model.state_dict().items()}
        states = {type(c).__name__: c.state_dict() for c in trainer.callbacks}
    learned = {key: value for key, value in results.items() if key not in OF_THE_MACHINE}
    return learned | {"memory": states.get("Remember")}, state


def train_in_float64(config: tk.RunConfig, **method: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    with in_float64():
        return train(config, **method)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("whole")
    return {name: train_in_float64(toy_config(folder / name), **method) for name, method in METHODS.items()}


def test_after_each_task_all_are_tested_and_within_tasks_every_few_steps(tmp_path, capsys):
    results, _ = train(toy_config(tmp_path / "run", eval_every_steps=4, eval_every=2))
    matrix = results["accuracy_matrix"]
    assert [row[task] for task, row in enumerate(matrix)] == [1.0] * 5
    assert matrix[0][3:] == [0.0, 0.0], "classes that were never seen"
    assert results["learning_accuracy"] == 1.0
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    logged = {line["step"]: line["eval/task0/accuracy"] for line in lines if "eval/task0/accuracy" in line}
    ends = [10, 20, 30, 40, 50]  # 80 samples per task, batches of 8
    assert sorted(logged) == sorted({1, *range(4, 50, 4), *ends})
    assert [logged[step] for step in (1, *ends)] == [results["accuracy_before"][0], *(row[0] for row in matrix)]
    said = capsys.readouterr().out
    assert "--eval-every 2: no effect" in said
    assert "--eval-every-steps" not in said


def test_what_contradicts_is_forgotten_unless_weights_are_held_or_samples_replayed(tmp_path):
    def after_both(name: str, **method: Any) -> tuple[list[float], float]:
        """Accuracy on each task, and loss on the first."""
        config = toy_config(tmp_path / name)
        results, _ = train(config, kind="flipped", **method)
        *_, last = read_metrics(tmp_path / name / "metrics.jsonl")
        return results["accuracy_matrix"][1], last["eval/task0/loss"]

    free, loss = after_both("free")
    assert free == [0.0, 1.0]
    assert after_both("held", strength=1e9)[0][0] > 0.9
    assert after_both("replayed", capacity=100)[1] < loss / 2


class WhatIsAdded(tk.Callback):
    """What a batch has beyond its own eight samples, step by step."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def on_step_start(self, trainer: tk.Trainer, micro_batches: list[Batch]) -> None:
        if trainer.state.step >= 6:  # the memory is filled every third step
            self.batches += [{name: column[8:] for name, column in batch.items()} for batch in micro_batches]


def test_replayed_samples_are_augmented_anew_at_each_visit(tmp_path):
    def marked(batch: Batch, visits: torch.Tensor) -> Batch:
        return {**batch, "visit": visits}

    added = WhatIsAdded()
    with toy_trainer(toy_config(tmp_path / "run"), added, capacity=20, augment=marked) as trainer:
        trainer.fit()
        (replay,) = (callback for callback in trainer.callbacks if isinstance(callback, Replay))
    visits = torch.cat([batch["visit"] for batch in added.batches])
    assert len(visits) == 8 * (len(added.batches))
    assert len(visits.unique()) == len(visits), "a visit happens once"
    rows = visits % len(replay.memory.table)
    assert len(rows.unique()) < len(rows) / 2, "most are replayed more than once"
    for name, column in replay.memory.table[rows].items():
        assert torch.equal(torch.cat([batch[name] for batch in added.batches]), column)


def test_a_change_of_task_raises_an_alarm(tmp_path):
    results, _ = train(toy_config(tmp_path / "run", epochs=4, log_every=1))
    ends = [40, 80, 120, 160]  # 80 samples per task, batches of 8, four times
    alarms = results["drift_alarms"]
    assert len(alarms) == 4
    assert all(end < alarm <= end + 8 for end, alarm in zip(ends, alarms, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_failed_within_a_task_goes_on_as_if_it_had_not(method, whole, tmp_path):
    config = toy_config(tmp_path / "run", checkpoint=CheckpointOptions(every_steps=4))
    with in_float64(), pytest.raises(RuntimeError, match="out of luck"):
        train(config, StopAfter(27), **METHODS[method])
    results, weights = train_in_float64(config, **METHODS[method])
    assert results == whole[method][0]
    for name, value in whole[method][1].items():
        assert torch.equal(weights[name], value), name


def check_ranks(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    outcomes = []
    for name, method in METHODS.items():
        outcomes.append(train_in_float64(toy_config(folder / name), **method))
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_processes_learns_and_remembers_the_same(world_size, whole, tmp_path):
    ranks = run_distributed(check_ranks, world_size, tmp_path)
    for outcomes in ranks:
        for name, (results, weights) in zip(METHODS, outcomes, strict=True):
            alone, weights_alone = whole[name]
            assert results["memory"] == alone["memory"]
            assert results["accuracy_matrix"] == alone["accuracy_matrix"]
            for key, value in weights_alone.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-9)


def test_stopping_early_is_refused_where_no_single_test_set_could_tell_when(tmp_path):
    config = toy_config(tmp_path / "run", early_stopping=EarlyStoppingOptions(patience=2))
    with pytest.raises(tk.UserError, match=r"early_stopping\.patience=2: this run has no single test set"):
        train(config)


def test_weights_that_are_cut_into_pieces_cannot_be_held(tmp_path):
    with pytest.raises(tk.UserError, match="dense_parallel='fsdp2' shards weights"):
        train(toy_config(tmp_path / "run", dense_parallel="fsdp2"), strength=1.0)


def test_within_its_task_an_example_can_only_be_of_its_classes():
    task = ClassificationWithinTasks([(0, 1), (2, 3)])
    batch = {
        "input": torch.tensor([[0.0, 1.0, 9.0, 9.0], [9.0, 9.0, 2.0, 1.0]]),
        "label": torch.tensor([1, 3]),
        "task": torch.tensor([0, 1]),
    }
    loss = task.loss(torch.nn.Identity(), batch)
    # Right by a margin of 1, then wrong by a margin of 1: log(1 + e^-1) and log(1 + e^1).
    assert loss.sum.item() == pytest.approx(0.3132617 + 1.3132617)
    assert task.sample_losses(torch.nn.Identity(), batch).tolist() == pytest.approx([0.3132617, 1.3132617])
    assert loss.sums["accuracy"].item() == 1
    assert loss.count == 2
    assert task.evaluate(torch.nn.Identity(), batch).sum.item() == loss.sum.item()


def test_named_tasks_are_hardly_forgotten(tmp_path):
    results, _ = train(toy_config(tmp_path / "run"), kind="task")
    assert results["accuracy_matrix"][4] == [1.0] * 5
    assert all(0.2 < accuracy < 0.8 for accuracy in results["accuracy_before"]), "one of two, not one of ten"
