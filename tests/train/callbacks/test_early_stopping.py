"""Runs that no longer get better end; evaluations come every few epochs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import toolkit as tk
from tests.support.small_run import small_config
from tests.support.trainers import standard_trainer
from toolkit.run.config.callback_options import CheckpointOptions, EarlyStoppingOptions
from toolkit.train.callbacks.early_stopping import EarlyStopping


class StandIn(SimpleNamespace):
    """As much of a trainer as the callback asks for."""

    def __init__(self):
        said: list[str] = []
        super().__init__(
            results={}, stopped=None, said=said, run=SimpleNamespace(print=said.append), state=SimpleNamespace(step=7)
        )

    def request_stop(self, reason):
        self.stopped = reason


def evaluations_until_stop(values, patience, metric="eval/loss") -> int | None:
    stopping, trainer = EarlyStopping(patience, metric), StandIn()
    for number, value in enumerate(values, 1):
        stopping.on_evaluate_end(trainer, "eval", {"eval/loss": value, "eval/accuracy": value})
        if trainer.stopped:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "settings", "evaluations"),
    [
        ([5, 4, 4, 4, 3, 2], {"patience": 2}, 4),
        ([5, 4, 4, 3, 3, 2], {"patience": 2}, None),
        ([1, 2, 3, 3, 3, 3], {"patience": 3, "metric": "eval/accuracy"}, 6),
        ([float("nan")] * 6, {"patience": 2}, 2),
        ([3, float("nan"), 2, 2], {"patience": 2}, None),
        ([1, 1, 1, 1, 1, 1], {"patience": None}, None),
        ([1, 1, 1, 1, 1, 1], {"patience": 1, "metric": "other/loss"}, None),
    ],
)
def test_early_stopping_without_improvement_stops_after_patience(values, settings, evaluations):
    assert evaluations_until_stop(values, **settings) == evaluations


def test_early_stopping_resumed_at_its_end_stops_again():
    stopping, again, trainer = EarlyStopping(2, "eval/loss"), EarlyStopping(2, "eval/loss"), StandIn()
    for _ in range(3):
        stopping.on_evaluate_end(StandIn(), "eval", {"eval/loss": 1.0})
    again.load_state_dict(stopping.state_dict())
    again.on_fit_start(trainer)
    assert trainer.results == {"stopped_early": "eval/loss was no better for 2 evaluations"}
    assert trainer.said == ["stopping at step 7: eval/loss was no better for 2 evaluations"]


class Note(tk.Callback):
    """Remembers after which epochs there was an evaluation, and says that each was as good as the one before."""

    def __init__(self):
        self.epochs = []

    def on_evaluate_end(self, trainer, name, metrics):  # noqa: ARG002
        self.epochs.append(trainer.state.step // trainer.batches.steps_per_epoch)
        metrics["eval/loss"] = 1.0


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"eval_every": 1}, [1, 2, 3]),
        ({"eval_every": 2}, [2, 3]),
        ({"eval_every": 5}, [3]),
        ({"eval_every": 0.5}, [0, 1, 1, 2, 2, 3]),
        ({"early_stopping": EarlyStoppingOptions(patience=1)}, [1, 2]),
    ],
    ids=["each epoch", "every other", "at the end at least", "twice an epoch", "until it stops"],
)
def test_evaluations_come_every_few_epochs_until_the_run_ends(settings, epochs, tmp_path):
    note = Note()
    with tk.start_run("small", small_config(tmp_path / "run", epochs=3, **settings)) as run:
        table = tk.TensorTable(input=torch.randn(20, 4), label=torch.arange(20) % 2)
        trainer = standard_trainer(run, tk.Classification(), tk.MLP(4, 2), train=table, test=table, callbacks=[note])
        results = trainer.fit()
    assert note.epochs == epochs
    assert results["epochs"] == epochs[-1]
    assert ("stopped_early" in results) == (epochs[-1] < 3)


class NoBetter(tk.Callback):
    """Says that each evaluation of one kind is as good as the one before, and each of another kind better."""

    def __init__(self, name):
        self.name, self.loss = name, 1.0

    def on_evaluate_end(self, trainer, name, metrics):  # noqa: ARG002
        self.loss /= 2
        metrics[f"{name}/loss"] = 1.0 if name == self.name else self.loss


@pytest.mark.parametrize(
    ("no_better", "best", "epochs"), [("validation", None, 2), ("eval", None, 3), ("eval", "test/loss", 2)]
)
def test_early_stopping_goes_by_validation_data_or_the_metric_of_the_best_checkpoint(no_better, best, epochs, tmp_path):
    config = small_config(
        tmp_path / "run",
        epochs=3,
        early_stopping=EarlyStoppingOptions(patience=1),
        checkpoint=CheckpointOptions(best=best),
    )
    with tk.start_run("small", config) as run:
        table = tk.TensorTable(input=torch.randn(20, 4), label=torch.arange(20) % 2)
        model = tk.MLP(4, 2)
        data = tk.Splits(table, table, validation=table)
        results = tk.fit(
            run,
            tk.Classification(),
            model,
            tk.build_optimizer(model, config),
            data,
            callbacks=[NoBetter(no_better)],
        )
    assert results["epochs"] == epochs
    assert {"validation_loss", "test_loss"} <= results.keys()
