"""The training loop: normalization of losses, clipping, log steps, schedules and evaluation."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.processes import run_distributed
from tests.support.trainers import in_hook
from tests.traps.toys import CLASSES, DIM, toy_data, toy_run, toy_trainer
from toolkit.data.batches import EvalBatches, TrainBatches
from toolkit.data.table import Batch, TensorTable
from toolkit.errors import UserError
from toolkit.integrations.accelerate.prepare import prepare
from toolkit.run.config.run import RunConfig
from toolkit.train.callbacks.base import Callback
from toolkit.train.optim import check_optimization, constant, warmup_cosine
from toolkit.train.task import Loss
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer


class Slope(nn.Module):
    """`weight * x`, with the weight 3 in a sub-module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.linear.weight, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, 1)).view(x.shape)


class WeightedTargets:
    """A task in which example x has x targets, each with loss weight * x."""

    def __init__(self, penalty_share: float | None = None):
        self.penalty_share = penalty_share

    def count(self, batch: Batch) -> int:
        return int(batch["x"].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        losses = model(batch["x"]) * batch["x"]
        penalty = None if self.penalty_share is None else model(torch.tensor(self.penalty_share, dtype=torch.float64))
        return Loss(losses.sum(), self.count(batch), penalty, {"targets": batch["x"].sum()})

    evaluate = loss


class Record(Callback):
    """Records learning rates, gradients and log steps."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.gradients: list[Tensor] = []
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def on_fit_start(self, trainer):
        trainer.run.log = lambda values, step: self.lines.append((step, dict(values)))

    def on_before_optimizer_step(self, trainer):
        self.rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        self.gradients.append(torch.cat([p.grad.flatten() for p in trainer.parameters]))


def numbers(count: int) -> TensorTable:
    return TensorTable(x=torch.arange(1.0, count + 1, dtype=torch.float64))


def slope_trainer(task: Any, samples: int, callbacks: Any = (), accumulation: int = 1, batches_of: int = 0) -> Trainer:
    run, model = toy_run(RunConfig(tracker="none", batch_size=8, gradient_accumulation_steps=accumulation)), Slope()
    ranks = {"rank": run.rank, "world_size": run.world_size, "accumulation": batches_of or accumulation}
    batches = TrainBatches(numbers(samples), batch_size=8, seed=0, **ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"max_steps": 1, "schedule": constant(), "max_grad_norm": None, "callbacks": callbacks}
    return Trainer(run, task, model, optimizer, batches, **settings)


def weighted_steps(accumulation: int) -> list[tuple[float, float, dict[str, Any]]]:
    """Return gradient, weight and metrics of a step over x = 1, 2, 3, 4, 5, without and with a penalty of 2 w."""
    world, found = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1, []
    for share in (None, 2.0 / world):
        record = Record()
        trainer = slope_trainer(WeightedTargets(share), 5, [record], accumulation)
        trainer.fit()
        found.append((record.gradients[0].item(), trainer.raw_model.linear.weight.item(), record.lines[0][1]))
    return found


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_loss_is_divided_once_by_the_count_over_ranks_and_micro_batches(world_size, accumulation):
    # Sum of losses w * x * x over 1..5 is 55 w; targets 15: gradient 55 / 15, loss 3 * 55 / 15 = 11.
    for (gradient, weight, metrics), (with_penalty, _, penalized) in run_distributed(
        weighted_steps, world_size, accumulation
    ):
        assert [gradient, metrics["train/grad_norm"]] == pytest.approx([55 / 15, 55 / 15], rel=1e-12)
        assert weight == pytest.approx(3 - 0.1 * 55 / 15, rel=1e-12)
        assert metrics["train/targets"] == 1.0
        # Each micro-batch has a penalty of 2 w over all ranks, weighted by its share of the targets.
        assert [with_penalty, penalized["train/penalty"]] == pytest.approx([55 / 15 + 2, 6.0], rel=1e-12)
        assert [metrics["train/loss"], penalized["train/loss"]] == pytest.approx([11.0, 11.0], rel=1e-12)


def test_batches_with_other_accumulation_than_the_run_raise():
    with pytest.raises(ValueError, match="4 micro-batches per step in a run that was made for 2"):
        slope_trainer(WeightedTargets(), 8, accumulation=2, batches_of=4)


def test_groups_follow_the_schedule_and_lines_come_at_log_steps_and_the_end():
    run, record, model = toy_run(RunConfig(tracker="none", batch_size=4)), Record(), nn.Linear(DIM, CLASSES).double()
    inputs, labels = toy_data(10)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.1}])
    batches = TrainBatches(TensorTable(input=inputs, label=labels), batch_size=4, seed=0)
    schedule = warmup_cosine(max_steps=8, warmup_steps=2)
    settings = {"max_steps": 8, "schedule": schedule, "log_every": 3, "callbacks": [record]}
    trainer = Trainer(run, Classification(), model, optimizer, batches, **settings)
    trainer.fit()
    assert record.rates == [[0.5 * schedule(step), 0.1 * schedule(step)] for step in range(8)]
    assert [step for step, _ in record.lines] == [3, 6, 8]
    for step, line in record.lines:
        assert line["train/learning_rate"] == 0.5 * schedule(step - 1)
        assert line["train/epoch"] == step / 3
    # Epochs of 10 samples in batches of 4, 4, 2: two epochs and two batches.
    assert trainer.state.samples == 10 + 10 + 4 + 4


def test_gradients_are_clipped_to_the_limit_and_the_norm_before_is_reported():
    """One step without a limit, above it and below it."""
    found: list[tuple[float, float, float]] = []
    for factor in (None, 0.5, 2.0):
        torch.manual_seed(0)
        record, limit = Record(), factor and factor * found[0][1]
        toy_trainer(max_steps=1, max_grad_norm=limit, callbacks=[record]).fit()
        found.append((limit or 0.0, record.lines[0][1]["train/grad_norm"], record.gradients[0].norm().item()))
    (_, norm, applied), (limit, *below), (_, *above) = found
    assert applied == pytest.approx(norm)
    assert below == [pytest.approx(norm), pytest.approx(limit, rel=1e-5)]
    assert above == pytest.approx([norm, norm])


@pytest.mark.parametrize("record", [True, False])
def test_learn_without_record_updates_weights_and_keeps_the_metrics(record):
    batches: list[Any] = []
    changed: list[bool] = []

    def replay(trainer: Trainer) -> None:
        step, sums, before = trainer.state.step, trainer.sums.compute(), trainer.parameters[0].detach().clone()
        trainer.learn(batches[-1], 0.5, record=record)
        changed.append(not torch.equal(before, trainer.parameters[0]))
        assert trainer.state.step == step
        assert (trainer.sums.compute() == sums) is not record

    callbacks = [in_hook("on_step_start", lambda _, each: batches.append(each)), in_hook("on_step_end", replay)]
    toy_trainer(max_steps=2, accumulation=2, callbacks=callbacks).fit()
    assert changed == [True, True]


class Counts:
    """A task with sums that depend on which samples are counted, and how often."""

    def count(self, batch: Batch) -> int:
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return Loss(model(batch["x"]).sum(), len(batch["x"]))

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        assert not model.training
        assert not torch.is_grad_enabled()
        return Loss(model(batch["x"]).sum(), len(batch["x"]), sums={"squares": batch["x"].square().sum()})


def evaluate_unequal_shares() -> list[dict[str, float]]:
    found = []
    for samples in (1, 7):
        trainer = slope_trainer(Counts(), samples)
        ranks = {"rank": trainer.run.rank, "world_size": trainer.run.world_size}
        found.append(trainer.evaluate(EvalBatches(numbers(samples), batch_size=3, **ranks), "held_out"))
        assert trainer.model.training
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_evaluation_counts_each_sample_once_for_any_world_size(world_size):
    for one, seven in run_distributed(evaluate_unequal_shares, world_size):
        assert one == pytest.approx({"held_out/loss": 3, "held_out/squares": 1}, rel=1e-12)
        assert seven == pytest.approx({"held_out/loss": 3 * 28 / 7, "held_out/squares": 140 / 7}, rel=1e-12)


def test_trainer_optimizer_of_part_of_the_model_raises_unless_the_rest_is_frozen():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"lacks 2 trainable parameter\(s\) of the model, such as '0.weight'"):
        check_optimization(model, optimizer, constant())
    model[0].requires_grad_(False)
    check_optimization(model, optimizer, constant())


def test_trainer_scheduler_that_steps_once_per_process_raises():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), optimizer)
    with pytest.raises(UserError, match="schedule: is prepared by Accelerate"):
        check_optimization(model, optimizer, scheduler)


def test_parameter_added_after_prepare_raises():
    grow = in_hook("on_step_end", lambda trainer: trainer.raw_model.append(nn.Linear(CLASSES, CLASSES).double()))
    with pytest.raises(ValueError, match=r"parameter '1\.weight' was added after the model was prepared"):
        toy_trainer(nn.Sequential(nn.Linear(DIM, CLASSES).double()), max_steps=3, callbacks=[grow]).fit()


def prepare_in_ddp() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(
        UserError, match=r"^model: is wrapped in DistributedDataParallel already. Pass the model inside"
    ):
        prepare(Accelerator(cpu=True), nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1))


def test_prepare_model_in_ddp_raises():
    run_distributed(prepare_in_ddp, 2)


def dropped_by_micro_batch() -> list[Tensor]:
    drawn: list[Tensor] = []

    def note(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        drawn.extend([output == 0] if len(output) else [])

    dropout = nn.Dropout(0.5)
    dropout.register_forward_hook(note)
    model = nn.Sequential(dropout, nn.Linear(DIM, CLASSES)).double()
    toy_trainer(model, max_steps=2, batch_size=16, accumulation=2).fit()
    return drawn


def test_dropout_differs_between_micro_batches_steps_and_ranks():
    drawn = [mask for of_rank in run_distributed(dropped_by_micro_batch, 2) for mask in of_rank]
    assert len(drawn) == 2 * 2 * 2
    assert len({tuple(mask[0].tolist() + mask[1].tolist()) for mask in drawn}) == len(drawn)
