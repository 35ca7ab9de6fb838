"""A loss, gradient or weight that is not finite stops training in one line, and never gets into a checkpoint."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toolkit as tk
from tests.support.helpers import run_distributed
from tests.support.small_run import small_config, small_trainer
from tests.support.trainers import standard_trainer
from toolkit.errors import UserError
from toolkit.experts.state import manifest
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.evaluation import Evaluation

BAD_STEP = 8
WHERE = {
    "loss": f"step {BAD_STEP}: the loss is not finite",
    "gradient": f"step {BAD_STEP}: the gradient of head.weight is not finite",
    "weight": f"step {BAD_STEP}: stem.bias is not finite",
}


class Poison(tk.Callback):
    """Makes something NaN in step `BAD_STEP`, on `rank`."""

    def __init__(self, what: str, at_once: bool = True, rank: int = 0):
        self.what, self.at_once, self.rank = what, at_once, rank

    def on_fit_start(self, trainer: tk.Trainer) -> None:
        trainer.finite.reads_at_once = self.at_once

    def on_step_start(self, trainer: tk.Trainer, micro_batches: list[dict[str, Tensor]]) -> None:
        if trainer.state.step != BAD_STEP - 1 or trainer.run.rank != self.rank:
            return
        if self.what == "loss":
            micro_batches[0]["input"].fill_(math.inf)
        elif self.what == "gradient":
            trainer.raw_model.head.weight.register_hook(lambda gradient: gradient * math.nan)
        else:
            trainer.raw_model.stem.bias.data[3] = math.inf


def poisoned(folder: Path, what: str, at_once: bool = True, rank: int = 0) -> tuple[str, list[str]]:
    """The error of a run of 20 steps that saves every second one, and the checkpoints that it leaves."""
    config = small_config(folder, log_every=20, checkpoint=CheckpointOptions(every_steps=2, keep=1))
    with (
        pytest.raises(UserError) as error,
        small_trainer(config, callbacks=[Poison(what, at_once, rank)]) as trainer,
    ):
        trainer.fit()
    return str(error.value), sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("what", ["loss", "gradient", "weight"])
def test_training_stops_at_the_first_tensor_that_is_not_finite(tmp_path: Path, what: str):
    (tmp_path / ".lock").touch()  # else it is not a folder of a run
    message, checkpoints = poisoned(tmp_path, what)
    assert message.startswith(WHERE[what])
    assert "\n" not in message
    first = {"loss": "stem is the first", "gradient": "all modules are finite", "weight": "stem is the first"}[what]
    assert f"{first}; the batch's rows are " in message
    assert ", ..." in message
    assert checkpoints == ["step-00000006"]
    assert manifest.find_damage(tmp_path / "checkpoints" / checkpoints[0]) is None


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_steps_that_are_read_late_are_named_as_well(tmp_path: Path, what: str):
    message, checkpoints = poisoned(tmp_path, what, at_once=False)
    assert message.startswith(WHERE[what])
    assert checkpoints == ["step-00000006"]


def poisoned_on_one_rank(folder: Path) -> tuple[str, list[str]]:
    return poisoned(folder, "loss", rank=1)


def test_every_rank_stops_with_the_same_line(tmp_path: Path):
    first, second = run_distributed(poisoned_on_one_rank, 2, tmp_path)
    assert first == second
    assert first[0].startswith(f"{WHERE['loss']} on rank 1 (the output of stem is the first; the batch's rows are ")
    assert first[1] == ["step-00000006"]


class Poisons(tk.Callback):
    """Makes the gradients of these steps NaN; notes the weights after each step."""

    def __init__(self, *steps: int):
        self.steps = steps
        self.weights: list[Tensor] = []

    def on_step_start(self, trainer: tk.Trainer, micro_batches: list[dict[str, Tensor]]) -> None:
        if trainer.state.step + 1 in self.steps:
            micro_batches[0]["input"][:] = math.nan

    def on_step_end(self, trainer: tk.Trainer) -> None:
        self.weights.append(trainer.raw_model.head.weight.detach().clone())


def test_steps_are_skipped_where_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    poisons = Poisons(5, 6, 9)
    with small_trainer(small_config(tmp_path, on_nonfinite="skip", log_every=1), callbacks=[poisons]) as trainer:
        results = trainer.run.finish(trainer.fit())
    same = [torch.equal(*pair) for pair in pairwise(poisons.weights)]
    assert [step for step, is_same in enumerate(same, start=2) if is_same] == [5, 6, 9]
    assert all(weight.isfinite().all() for weight in poisons.weights)
    assert results["skipped_steps"] == 3
    out = capsys.readouterr().out
    assert out.count("warning: step 5 is skipped: its gradients are not finite (the output of stem is the first;") == 1
    assert "3 step(s) whose gradients were not finite" in out
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [line.get("train/skipped_steps") for line in lines if line["step"] in (3, 9, 20)] == [None, 3, 3]
    assert all(math.isfinite(line["train/loss"]) for line in lines if "train/loss" in line)


def test_three_steps_in_a_row_are_not_skipped(tmp_path: Path):
    with (
        pytest.raises(
            UserError, match=r"step 7: the loss is not finite for the 3rd time in a row \(the output of stem"
        ),
        small_trainer(small_config(tmp_path, on_nonfinite="skip"), callbacks=[Poisons(5, 6, 7)]) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize("what", ["moe.experts.up", "optimizer state 'exp_avg_sq' of 'moe.experts.up'"])
def test_what_overflows_in_an_update_is_never_saved(what: str, tmp_path: Path):
    """The gradients of the step before were finite, and of a second moment that is infinite no later step tells."""

    class Overflow(tk.Callback):
        def on_step_end(self, trainer: tk.Trainer) -> None:
            if trainer.state.step == 4:
                up = trainer.raw_model.moe.experts.up
                (up.data if what == "moe.experts.up" else trainer.optimizer.state[up]["exp_avg_sq"]).fill_(math.inf)

    config = small_config(tmp_path, checkpoint=CheckpointOptions(every_steps=2, keep=1))
    with (
        pytest.raises(UserError, match=f"after step 4: {what} is not finite"),
        small_trainer(config, callbacks=[Overflow()]) as trainer,
    ):
        trainer.fit()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("values", "is_right"), [([3e38, 3e38], True), ([0.0, -math.inf], True), ([1.0, math.nan], False)]
)
def test_large_numbers_and_masks_are_right_and_nan_is_not(tmp_path: Path, values: list[float], is_right: bool):
    """Also where the sum of a tensor overflows."""
    with small_trainer(small_config(tmp_path)) as trainer:
        trainer.raw_model.register_buffer("held", torch.tensor(values))
        if is_right:
            trainer.finite.check_weights(0)
        else:
            with pytest.raises(UserError, match="after step 0: held is not finite"):
                trainer.finite.check_weights(0)


class LossWithoutGradient:
    """A loss that is NaN from a step on while all gradients are finite."""

    def __init__(self, task: Any):
        self.task, self.count, self.evaluate = task, task.count, task.evaluate

    def loss(self, model: torch.nn.Module, batch: dict[str, Tensor]) -> tk.Loss:
        loss = self.task.loss(model, batch)
        return tk.Loss(loss.sum + torch.tensor(math.nan), loss.count, None, {})


def test_a_mean_loss_that_is_not_finite_stops_at_the_next_line_of_metrics(tmp_path: Path):
    with small_trainer(small_config(tmp_path, log_every=3)) as trainer:
        trainer.task = LossWithoutGradient(trainer.task)
        with pytest.raises(UserError, match="step 3: train/loss is nan"):
            trainer.fit()


@pytest.mark.parametrize(
    ("values", "best"), [([math.nan, 2.0, 1.0, 3.0], 1.0), ([2.0, math.nan], 2.0), ([math.nan], math.nan)]
)
def test_nan_is_the_worst_of_all_evaluations(values: list[float], best: float):
    evaluation = Evaluation(batches=None)
    for value in values:
        evaluation._note("test_loss", value)
    assert evaluation._results["best_test_loss"] == pytest.approx(best, nan_ok=True)
    assert evaluation._results["test_loss"] == pytest.approx(values[-1], nan_ok=True)


class Drift(tk.Callback):
    """Changes a weight on the last rank after step 4."""

    def __init__(self, name: str):
        self.name = name

    def on_step_end(self, trainer: tk.Trainer) -> None:
        if trainer.state.step == 4 and trainer.run.rank == trainer.run.world_size - 1:
            trainer.raw_model.get_parameter(self.name).data[0, 0] += 1e-3


def drifted(folder: Path, name: str, settings: dict[str, Any]) -> str:
    with (
        pytest.raises(UserError) as error,
        small_trainer(small_config(folder, **settings), ep_size=2, callbacks=[Drift(name)]) as trainer,
    ):
        trainer.fit()
    return str(error.value)


@pytest.mark.parametrize(
    ("world", "name", "settings"),
    [
        (2, "head.weight", {"log_every": 6}),
        (2, "head.weight", {"log_every": 50, "checkpoint": CheckpointOptions(every_steps=6)}),
        (4, "moe.experts.up", {"log_every": 5, "batch_size": 20}),
    ],
)
def test_a_weight_that_drifts_on_one_rank_ends_training_at_the_next_line_or_checkpoint(
    tmp_path: Path, world: int, name: str, settings: dict[str, Any]
):
    step, where = (6, "") if world == 2 else (5, " of the experts of EP rank 1")
    expected = f"the weights of 1 parameter(s), first '{name}'{where}, differ between ranks in step {step}"
    for told in run_distributed(drifted, world, tmp_path, name, settings):
        assert expected in told


@pytest.mark.parametrize("kind", ["table", "loader"])
def test_the_row_of_the_data_that_is_not_finite_is_named(tmp_path: Path, kind: str):
    inputs, labels = torch.zeros(20, 4), torch.arange(20) % 2
    inputs[13, 2] = math.nan
    table = tk.TensorTable(input=inputs, label=labels)
    data = table if kind == "table" else torch.utils.data.TensorDataset(inputs, labels)
    with tk.start_run("small", small_config(tmp_path, epochs=1)) as run, pytest.raises(UserError) as error:
        standard_trainer(run, tk.Classification(), tk.MLP(4, 2), train=data, test=table).fit()
    which = "row 13 of the training data" if kind == "table" else "the batch"
    assert f"({which} is not finite in the column `input`; " in str(error.value)
    assert str(error.value).endswith(". Correct or drop it; earlier checkpoints are kept.")
