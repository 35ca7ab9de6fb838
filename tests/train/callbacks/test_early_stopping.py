"""Early stopping and the interval of evaluations."""

from types import SimpleNamespace

import pytest
import torch

import toolkit as tk
from tests.support.trainers import fit
from toolkit.run.config.callback_options import CheckpointOptions, EarlyStoppingOptions
from toolkit.train.callbacks.early_stopping import EarlyStopping

NAN = float("nan")


class StubTrainer(SimpleNamespace):
    def __init__(self):
        lines: list[str] = []
        run, state = SimpleNamespace(print=lines.append), SimpleNamespace(step=7)
        super().__init__(results={}, stop_reason=None, lines=lines, run=run, state=state)

    def request_stop(self, reason):
        self.stop_reason = reason


def evaluations_until_stop(values, patience, metric="eval/loss", mode=None) -> int | None:
    stopping, trainer = EarlyStopping(patience, metric, mode), StubTrainer()
    for number, value in enumerate(values, 1):
        stopping.on_evaluate_end(trainer, "eval", {metric: value})
        if trainer.stop_reason:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "settings", "evaluations"),
    [
        ([5, 4, 4, 4, 3, 2], {"patience": 2}, 4),
        ([5, 4, 4, 3, 3, 2], {"patience": 2}, None),
        ([1, 2, 3, 4, 5, 6], {"patience": 2}, 3),
        ([1, 2, 3, 3, 3, 3], {"patience": 3, "metric": "eval/accuracy"}, 6),
        ([3, 2, 1, 0], {"patience": 2, "metric": "eval/macro_f1"}, 3),
        ([3, 2, 1, 0], {"patience": 2, "metric": "eval/recall", "mode": "max"}, 3),
        ([3, 4, 5, 6], {"patience": 2, "metric": "eval/wer"}, 3),
        ([NAN] * 6, {"patience": 2}, 2),
        ([3, NAN, 2, 2], {"patience": 2}, None),
        ([1] * 6, {"patience": None}, None),
        ([1] * 6, {"patience": 1, "metric": "other/loss"}, None),
    ],
)
def test_early_stopping_without_improvement_stops_after_patience(values, settings, evaluations):
    assert evaluations_until_stop(values, **settings) == evaluations


def test_early_stopping_resumed_at_its_end_stops_again():
    stopping, resumed, trainer = EarlyStopping(2, "eval/loss"), EarlyStopping(2, "eval/loss"), StubTrainer()
    for _ in range(3):
        stopping.on_evaluate_end(StubTrainer(), "eval", {"eval/loss": 1.0})
    resumed.load_state_dict(stopping.state_dict())
    resumed.on_fit_start(trainer)
    assert trainer.results == {"stopped_early": "eval/loss was no better for 2 evaluations"}
    assert trainer.lines == ["stopping at step 7: eval/loss was no better for 2 evaluations"]


class Losses(tk.Callback):
    """Replaces the losses of evaluations named `constant` by 1, and all others by falling losses."""

    def __init__(self, constant: str):
        self.constant, self.loss, self.epochs = constant, 1.0, []

    def on_evaluate_end(self, trainer, name, metrics):
        self.epochs.append(trainer.state.step // trainer.batches.steps_per_epoch)
        self.loss /= 2
        metrics[f"{name}/loss"] = 1.0 if name == self.constant else self.loss


TABLE = tk.TensorTable(input=torch.randn(20, 4), label=torch.arange(20) % 2)


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"eval_every": 1}, [1, 2, 3]),
        ({"eval_every": 2}, [2, 3]),
        ({"eval_every": 5}, [3]),
        ({"eval_every": 0.5}, [0, 1, 1, 2, 2, 3]),
        ({"early_stopping": EarlyStoppingOptions(patience=1)}, [1, 2]),
    ],
    ids=["each epoch", "every other epoch", "last epoch", "twice an epoch", "early stopping"],
)
def test_evaluations_come_every_few_epochs_until_the_run_ends(settings, epochs, tmp_path):
    losses = Losses("eval")
    results = fit(tmp_path / "run", tk.MLP(4, 2), TABLE, epochs=3, batch_size=10, callbacks=[losses], **settings)
    assert losses.epochs == epochs
    assert results["epochs"] == epochs[-1]
    assert ("stopped_early" in results) == (epochs[-1] < 3)


@pytest.mark.parametrize(
    ("constant", "best", "epochs"), [("validation", None, 2), ("eval", None, 3), ("eval", "test/loss", 2)]
)
def test_early_stopping_uses_validation_data_or_the_metric_of_the_best_checkpoint(constant, best, epochs, tmp_path):
    settings = {"early_stopping": EarlyStoppingOptions(patience=1), "checkpoint": CheckpointOptions(best=best)}
    data = {"validation": TABLE, "callbacks": [Losses(constant)]}
    results = fit(tmp_path / "run", tk.MLP(4, 2), TABLE, epochs=3, batch_size=10, **data, **settings)
    assert results["epochs"] == epochs
    assert {"validation_loss", "test_loss"} <= results.keys()
