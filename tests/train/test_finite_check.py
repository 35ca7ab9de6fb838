"""Non-finite losses, gradients and weights stop training and are never saved."""

import math
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.support.small_run import small_config, small_trainer
from tests.support.trainers import fit, in_hook
from toolkit.errors import UserError
from toolkit.experts.state import manifest
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.evaluation import Evaluation

BAD_STEP = 8
ERRORS = {
    "loss": f"step {BAD_STEP}: the loss is not finite",
    "gradient": f"step {BAD_STEP}: the gradient of head.weight is not finite",
    "weight": f"step {BAD_STEP}: stem.bias is not finite",
}


def error_of(folder: Path, *callbacks: tk.Callback, ep_size: int = 1, **settings: Any) -> str:
    config = small_config(folder, **settings)
    with pytest.raises(UserError) as error, small_trainer(config, ep_size=ep_size, callbacks=callbacks) as trainer:
        trainer.fit()
    return str(error.value)


def poisoned(folder: Path, source: str, at_once: bool = True, rank: int = 0) -> tuple[str, list[str]]:
    """Return the error and the checkpoints of a run in which a tensor becomes infinite or NaN in step `BAD_STEP`."""

    def poison(trainer: tk.Trainer, micro_batches: list[dict[str, Tensor]]) -> None:
        if trainer.run.rank != rank:
            return
        if source == "loss":
            micro_batches[0]["input"].fill_(math.inf)
        elif source == "gradient":
            trainer.raw_model.head.weight.register_hook(lambda gradient: gradient * math.nan)
        else:
            trainer.raw_model.stem.bias.data[3] = math.inf

    callbacks = [
        in_hook("on_fit_start", lambda trainer: setattr(trainer.finite, "reads_at_once", at_once)),
        in_hook("on_step_start", poison, BAD_STEP - 1),
    ]
    message = error_of(folder, *callbacks, log_every=20, checkpoint=CheckpointOptions(every_steps=2, keep=1))
    return message, sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("source", "first"),
    [("loss", "stem is the first"), ("gradient", "all modules are finite"), ("weight", "stem is the first")],
)
def test_training_stops_at_the_first_non_finite_tensor(tmp_path, source, first):
    message, checkpoints = poisoned(tmp_path / "run", source)
    assert message.startswith(ERRORS[source])
    assert "\n" not in message
    assert f"{first}; the batch's rows are " in message
    assert ", ..." in message
    assert checkpoints == ["step-00000006"]
    assert manifest.find_damage(tmp_path / "run" / "checkpoints" / checkpoints[0]) is None


@pytest.mark.parametrize("source", ["loss", "gradient"])
def test_deferred_check_names_the_step(tmp_path, source):
    message, checkpoints = poisoned(tmp_path / "run", source, at_once=False)
    assert message.startswith(ERRORS[source])
    assert checkpoints == ["step-00000006"]


def test_non_finite_loss_on_one_rank_raises_on_all_ranks(tmp_path):
    first, second = run_distributed(poisoned, 2, tmp_path / "run", "loss", True, 1)
    assert first == second
    assert first[0].startswith(f"{ERRORS['loss']} on rank 1 (the output of stem is the first; the batch's rows are ")
    assert first[1] == ["step-00000006"]


def poison_inputs(*steps: int) -> list[tk.Callback]:
    """Return callbacks that make the gradients of `steps` NaN."""
    return [in_hook("on_step_start", lambda _, batches: batches[0]["input"].fill_(math.nan), s - 1) for s in steps]


def test_skip_leaves_out_non_finite_steps(tmp_path, capsys):
    weights = []
    record = in_hook("on_step_end", lambda trainer: weights.append(trainer.raw_model.head.weight.detach().clone()))
    config = small_config(tmp_path, on_nonfinite="skip", log_every=1)
    with small_trainer(config, callbacks=[*poison_inputs(5, 6, 9), record]) as trainer:
        results = trainer.run.finish(trainer.fit())
    assert [s for s, pair in enumerate(pairwise(weights), start=2) if torch.equal(*pair)] == [5, 6, 9]
    assert all(weight.isfinite().all() for weight in weights)
    assert results["skipped_steps"] == 3
    out = capsys.readouterr().out
    assert out.count("warning: step 5 is skipped: its gradients are not finite (the output of stem is the first;") == 1
    assert "3 step(s) whose gradients were not finite" in out
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [line.get("train/skipped_steps") for line in lines if line["step"] in (3, 9, 20)] == [None, 3, 3]
    assert all(math.isfinite(line["train/loss"]) for line in lines if "train/loss" in line)


def test_skip_of_three_steps_in_a_row_raises(tmp_path):
    message = error_of(tmp_path, *poison_inputs(5, 6, 7), on_nonfinite="skip")
    assert message.startswith("step 7: the loss is not finite for the 3rd time in a row (the output of stem")


@pytest.mark.parametrize("name", ["moe.experts.up", "optimizer state 'exp_avg_sq' of 'moe.experts.up'"])
def test_overflow_in_an_update_is_not_saved(name, tmp_path):
    def overflow(trainer: tk.Trainer) -> None:
        up = trainer.raw_model.moe.experts.up
        (up.data if name == "moe.experts.up" else trainer.optimizer.state[up]["exp_avg_sq"]).fill_(math.inf)

    options = CheckpointOptions(every_steps=2, keep=1)
    message = error_of(tmp_path / "run", in_hook("on_step_end", overflow, 4), checkpoint=options)
    assert message.startswith(f"after step 4: {name} is not finite")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("values", "valid"), [([3e38, 3e38], True), ([0.0, -math.inf], True), ([1.0, math.nan], False)]
)
def test_check_weights_accepts_large_values_and_infinite_masks(tmp_path, values, valid):
    with small_trainer(small_config(tmp_path)) as trainer:
        trainer.raw_model.register_buffer("held", torch.tensor(values))
        error = pytest.raises(UserError, match="after step 0: held is not finite")
        with nullcontext() if valid else error:
            trainer.finite.check_weights(0)


class NanLoss(tk.Classification):
    """A task with a NaN loss and finite gradients."""

    def loss(self, model: torch.nn.Module, batch: dict[str, Tensor]) -> tk.Loss:
        loss = super().loss(model, batch)
        return tk.Loss(loss.sum + torch.tensor(math.nan), loss.count, None, {})


def test_non_finite_mean_loss_raises_at_the_next_log_step(tmp_path):
    with small_trainer(small_config(tmp_path, log_every=3)) as trainer:
        trainer.task = NanLoss()
        with pytest.raises(UserError, match="step 3: train/loss is nan"):
            trainer.fit()


@pytest.mark.parametrize(
    ("values", "best"), [([math.nan, 2.0, 1.0, 3.0], 1.0), ([2.0, math.nan], 2.0), ([math.nan], math.nan)]
)
def test_evaluation_ranks_nan_last(values, best):
    evaluation = Evaluation(batches=None)
    for value in values:
        evaluation._note("test_loss", value)
    assert evaluation._results["best_test_loss"] == pytest.approx(best, nan_ok=True)
    assert evaluation._results["test_loss"] == pytest.approx(values[-1], nan_ok=True)


def drifted(folder: Path, settings: dict[str, Any]) -> str:
    """Return the error of a run in which a weight changes on rank 1 after step 12, when no step is checked any more."""

    def drift(trainer: tk.Trainer) -> None:
        if trainer.run.rank == 1:
            trainer.raw_model.head.weight.data[0, 0] += 1e-3

    return error_of(folder, in_hook("on_step_end", drift, 12), ep_size=2, **settings)


@pytest.mark.parametrize(
    "settings",
    [{"log_every": 14}, {"log_every": 50, "checkpoint": CheckpointOptions(every_steps=14)}],
    ids=["log step", "checkpoint"],
)
def test_drift_of_one_rank_raises_at_the_next_log_step_or_checkpoint(tmp_path, settings):
    expected = "the weights of 1 parameter(s), first 'head.weight', differ between ranks in step 14"
    for message in run_distributed(drifted, 2, tmp_path, settings):
        assert expected in message


@pytest.mark.parametrize("kind", ["table", "loader"])
def test_error_names_the_row_of_a_non_finite_input(tmp_path, kind):
    inputs, labels = torch.zeros(20, 4), torch.arange(20) % 2
    inputs[13, 2] = math.nan
    table = tk.TensorTable(input=inputs, label=labels)
    data = table if kind == "table" else torch.utils.data.TensorDataset(inputs, labels)
    source = "row 13 of the training data" if kind == "table" else "the batch"
    message = rf"\({source} is not finite in the column `input`; .*\. Correct or drop it; earlier checkpoints are kept"
    with pytest.raises(UserError, match=message):
        fit(tmp_path, tk.MLP(4, 2), data, table, batch_size=10)
