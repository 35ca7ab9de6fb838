"""The loop: how losses are normalised, what is written when, and that ordinary steps do not wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.helpers import run_distributed
from tests.traps.toys import CLASSES, DIM, ToyMixture, toy_data, toy_run, toy_trainer
from toolkit.data.batches import EvalBatches, TrainBatches
from toolkit.data.table import Batch, TensorTable
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.integrations.accelerate.prepare import prepare
from toolkit.run.config.run import RunConfig
from toolkit.train.callbacks.base import Callback
from toolkit.train.optim import check_optimization, constant, initial_rates, warmup_cosine
from toolkit.train.task import Loss
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

# --- the loss is a sum and a count ------------------------------------------------------------------------------------


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))


class WeightTimesX(nn.Module):
    """`weight * x`, with the weight in a sub-module."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = Slope()

    def forward(self, x: Tensor) -> Tensor:
        return self.slope.weight * x


class WeightedTargets:
    """Example x has x targets, each with loss weight * x; and a penalty whose whole is weight, split over ranks."""

    def __init__(self, penalty_share: float | None = None):
        self.penalty_share = penalty_share

    def count(self, batch: Batch) -> int:
        return int(batch["x"].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        losses = model(batch["x"]) * batch["x"]
        penalty = None if self.penalty_share is None else model(torch.tensor(self.penalty_share, dtype=torch.float64))
        return Loss(losses.sum(), self.count(batch), penalty, {"targets": batch["x"].sum()})

    evaluate = loss


class Gradients(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.seen.append(trainer.parameters[0].grad.item())


class Lines:
    """A run that keeps its lines of metrics."""

    def __init__(self, run: Any):
        self.lines: list[tuple[int, dict[str, Any]]] = []
        run.log = lambda values, step: self.lines.append((step, dict(values)))


def weighted_run(accumulation: int, penalty_share: float | None) -> dict[str, Any]:
    """One step over x = 1, 2, 3, 4, 5, in any number of pieces."""
    run = toy_run(RunConfig(tracker="none", batch_size=8, gradient_accumulation_steps=accumulation))
    share = None if penalty_share is None else penalty_share / run.world_size
    model, gradients, lines = WeightTimesX(), Gradients(), Lines(run)
    table = TensorTable(x=torch.arange(1.0, 6.0, dtype=torch.float64))
    batches = TrainBatches(
        table, batch_size=8, seed=0, accumulation=accumulation, rank=run.rank, world_size=run.world_size
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = WeightedTargets(share)
    Trainer(
        run,
        task,
        model,
        optimizer,
        batches,
        max_steps=1,
        schedule=constant(),
        max_grad_norm=None,
        callbacks=[gradients],
    ).fit()
    return {"gradient": gradients.seen[0], "weight": model.slope.weight.item(), "line": lines.lines[0][1]}


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_the_loss_is_divided_once_by_the_count_over_all_ranks_and_micro_batches(world_size: int, accumulation: int):
    # Sum of losses w * x * x over 1..5 is 55 w; targets 15: gradient 55 / 15, loss 3 * 55 / 15 = 11.
    for answer in run_distributed(weighted_run, world_size, accumulation, None):
        assert answer["gradient"] == pytest.approx(55 / 15, rel=1e-12)
        assert answer["weight"] == pytest.approx(3 - 0.1 * 55 / 15, rel=1e-12)
        assert answer["line"]["train/loss"] == pytest.approx(11.0, rel=1e-12)
        assert answer["line"]["train/targets"] == 1.0
        assert answer["line"]["train/grad_norm"] == pytest.approx(55 / 15, rel=1e-12)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_penalty_weighs_as_much_as_its_micro_batchs_share_of_the_count(world_size: int, accumulation: int):
    # The penalty of each micro-batch is 2 w over all ranks; weighted by counts that add up to the whole, 2 w.
    for answer in run_distributed(weighted_run, world_size, accumulation, 2.0):
        assert answer["gradient"] == pytest.approx(55 / 15 + 2, rel=1e-12)
        assert answer["line"]["train/penalty"] == pytest.approx(6.0, rel=1e-12)
        assert answer["line"]["train/loss"] == pytest.approx(11.0, rel=1e-12)


def weights_after_training(batch_size: int, accumulation: int) -> dict[str, Tensor]:
    """Seven AdamW steps with clipping, on 21 samples, so that each epoch ends with a short batch."""
    model = ToyMixture(ExpertGroups())
    toy_trainer(
        model, max_steps=7, samples=21, batch_size=batch_size, accumulation=accumulation, max_grad_norm=0.1
    ).fit()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_accumulating_k_micro_batches_equals_one_batch_of_their_sum(accumulation: int):
    (whole,) = run_distributed(weights_after_training, 1, 8, 1)
    (pieces,) = run_distributed(weights_after_training, 1, 8, accumulation)
    for name, value in whole.items():
        torch.testing.assert_close(
            pieces[name], value, rtol=0, atol=1e-11
        )  # Adam divides small gradients, rounding and all, by their size


def mismatched_accumulation() -> None:
    run, model = toy_run(RunConfig(tracker="none", gradient_accumulation_steps=2)), WeightTimesX()
    batches = TrainBatches(TensorTable(x=torch.ones(8)), batch_size=8, seed=0, accumulation=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="4 micro-batches per step in a run that was made for 2"):
        Trainer(run, WeightedTargets(), model, optimizer, batches, max_steps=1, schedule=constant())


def test_batches_and_run_must_agree_on_the_number_of_micro_batches():
    run_distributed(mismatched_accumulation, 1)


# --- schedule, clipping, lines of metrics -----------------------------------------------------------------------------


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.seen.append([group["lr"] for group in trainer.optimizer.param_groups])


def rates_and_lines() -> dict[str, Any]:
    run, rates = toy_run(RunConfig(tracker="none", batch_size=4)), Rates()
    lines, (inputs, labels) = Lines(run), toy_data(10)
    model = nn.Linear(DIM, CLASSES).double()
    trainer = Trainer(
        run,
        Classification(),
        model,
        torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.1}]),
        TrainBatches(TensorTable(input=inputs, label=labels), batch_size=4, seed=0),
        max_steps=8,
        schedule=warmup_cosine(max_steps=8, warmup_steps=2),
        log_every=3,
        callbacks=[rates],
    )
    trainer.fit()
    return {"rates": rates.seen, "lines": lines.lines, "samples": trainer.state.samples}


def test_each_group_follows_the_schedule_and_lines_appear_at_log_steps_and_at_the_end():
    (answer,) = run_distributed(rates_and_lines, 1)
    schedule = warmup_cosine(max_steps=8, warmup_steps=2)
    assert answer["rates"] == [[0.5 * schedule(step), 0.1 * schedule(step)] for step in range(8)]
    assert [step for step, _ in answer["lines"]] == [3, 6, 8]
    for step, line in answer["lines"]:
        assert line["train/learning_rate"] == 0.5 * schedule(step - 1)
        assert line["train/epoch"] == step / 3
    # Epochs of 10 samples in batches of 4, 4, 2: two epochs and two batches.
    assert answer["samples"] == 10 + 10 + 4 + 4


def rates_under_a_scheduler(make: str) -> list[list[float]]:
    run, rates = toy_run(RunConfig(tracker="none", batch_size=4)), Rates()
    inputs, labels = toy_data(10)
    model = nn.Linear(DIM, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if make == "torch":
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    elif make == "transformers":
        from transformers import get_linear_schedule_with_warmup

        get_linear_schedule_with_warmup(optimizer, 5, 10)
    batches = TrainBatches(TensorTable(input=inputs, label=labels), batch_size=4, seed=0)
    how = {"max_steps": 2, "schedule": warmup_cosine(max_steps=8, warmup_steps=2), "callbacks": [rates]}
    Trainer(run, Classification(), model, optimizer, batches, **how).fit()
    return rates.seen


@pytest.mark.parametrize("make", ["torch", "transformers"])
def test_a_scheduler_that_was_made_before_does_not_leave_its_first_rate_behind(make):
    plain, under_a_scheduler = (run_distributed(rates_under_a_scheduler, 1, kind)[0] for kind in ("none", make))
    assert under_a_scheduler == plain
    assert plain[0][0] > 0


def test_rates_of_zero_are_refused():
    weight = nn.Linear(1, 1)
    with pytest.raises(UserError, match="the learning rate of every group is 0"):
        initial_rates(torch.optim.SGD(weight.parameters(), lr=0.0))
    groups = [{"params": [weight.weight], "lr": 0.0}, {"params": [weight.bias]}]
    assert initial_rates(torch.optim.SGD(groups, lr=0.1)) == [0.0, 0.1]


def norms(max_grad_norm: float | None) -> tuple[float, float]:
    """(reported, applied) norm of the gradient of one step."""
    applied = []

    class Measure(Callback):
        def on_before_optimizer_step(self, trainer: Trainer) -> None:
            applied.append(torch.cat([p.grad.flatten() for p in trainer.parameters]).norm().item())

    trainer = toy_trainer(max_steps=1, max_grad_norm=max_grad_norm, callbacks=[Measure()])
    lines = Lines(trainer.run)
    trainer.fit()
    return lines.lines[0][1]["train/grad_norm"], applied[0]


def test_gradients_are_clipped_to_the_limit_and_the_norm_before_is_reported():
    ((free, applied),) = run_distributed(norms, 1, None)
    assert applied == pytest.approx(free)
    ((reported, applied),) = run_distributed(norms, 1, free / 2)
    assert reported == pytest.approx(free)
    assert applied == pytest.approx(free / 2, rel=1e-5)
    ((reported, applied),) = run_distributed(norms, 1, free * 2)
    assert (reported, applied) == pytest.approx((free, free))


class StopAtTwo(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == 2:
            trainer.request_stop("enough")


class ReplayBetweenSteps(Callback):
    """One more optimizer step on the last micro-batches after each step, left out of the metrics where told so."""

    def __init__(self, record: bool) -> None:
        self.record = record
        self.changed: list[bool] = []

    def on_step_start(self, _: Trainer, micro_batches: list[Batch]) -> None:
        self.micro_batches = micro_batches

    def on_step_end(self, trainer: Trainer) -> None:
        step, sums, before = trainer.state.step, trainer.sums.compute(), trainer.parameters[0].detach().clone()
        trainer.learn(self.micro_batches, 0.5, record=self.record)
        self.changed.append(not torch.equal(before, trainer.parameters[0]))
        assert trainer.state.step == step
        assert (trainer.sums.compute() == sums) is not self.record


def replayed(record: bool) -> list[bool]:
    replay = ReplayBetweenSteps(record)
    toy_trainer(max_steps=2, accumulation=2, callbacks=[replay]).fit()
    return replay.changed


@pytest.mark.parametrize("record", [True, False])
def test_a_step_that_is_not_recorded_updates_weights_and_leaves_the_metrics(record: bool):
    assert run_distributed(replayed, 1, record) == [[True, True]]


def steps_until_stopped() -> tuple[int, str | None]:
    trainer = toy_trainer(max_steps=9, callbacks=[StopAtTwo()])
    trainer.fit()
    return trainer.state.step, trainer.stop_reason


def test_a_callback_can_end_training_after_a_step():
    assert run_distributed(steps_until_stopped, 1) == [(2, "enough")]


# --- evaluation -------------------------------------------------------------------------------------------------------


class Counts:
    """Reports sums that tell which samples were counted, and how often."""

    def count(self, batch: Batch) -> int:
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return Loss(model(batch["x"]).sum(), len(batch["x"]))

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        assert not model.training
        assert not torch.is_grad_enabled()
        return Loss(model(batch["x"]).sum(), len(batch["x"]), sums={"squares": batch["x"].square().sum()})


def evaluate_uneven(samples: int) -> dict[str, Any]:
    run = toy_run()
    model = WeightTimesX()
    table = TensorTable(x=torch.arange(1.0, samples + 1, dtype=torch.float64))
    where = {"rank": run.rank, "world_size": run.world_size}
    batches = TrainBatches(table, batch_size=4, seed=0, **where)
    trainer = Trainer(
        run, Counts(), model, torch.optim.SGD(model.parameters(), lr=1.0), batches, max_steps=1, schedule=constant()
    )
    metrics = trainer.evaluate(EvalBatches(table, batch_size=3, **where), "held_out")
    return metrics | {"training_again": trainer.model.training}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 7])
def test_evaluation_counts_each_sample_once_on_any_number_of_processes(world_size: int, samples: int):
    total, squares = sum(range(samples + 1)), sum(x * x for x in range(samples + 1))
    for metrics in run_distributed(evaluate_uneven, world_size, samples):
        assert metrics["held_out/loss"] == pytest.approx(3 * total / samples, rel=1e-12)
        assert metrics["held_out/squares"] == pytest.approx(squares / samples, rel=1e-12)
        assert metrics["training_again"]


def test_trainer_optimizer_of_part_of_the_model_raises_unless_the_rest_is_frozen():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(
        UserError, match=r"optimizer: lacks 2 trainable parameter\(s\) of the model, such as '0.weight'"
    ):
        check_optimization(model, optimizer, constant())
    model[0].requires_grad_(False)
    check_optimization(model, optimizer, constant())


def test_trainer_scheduler_that_steps_once_per_process_raises():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), optimizer)
    with pytest.raises(UserError, match="schedule: is prepared by Accelerate"):
        check_optimization(model, optimizer, scheduler)


def prepared_in_ddp() -> str:
    model = DistributedDataParallel(nn.Linear(2, 2))
    try:
        prepare(Accelerator(cpu=True), nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1))
    except UserError as error:
        return str(error)
    return ""


def test_prepare_model_in_ddp_raises():
    for said in run_distributed(prepared_in_ddp, 2):
        assert said == "model: is wrapped in DistributedDataParallel already. Pass the model inside, `model.module`."


def dropped_by_micro_batch() -> list[Tensor]:
    drawn: list[Tensor] = []

    def note(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        drawn.extend([output == 0] if len(output) else [])

    dropout = nn.Dropout(0.5)
    dropout.register_forward_hook(note)
    toy_trainer(
        nn.Sequential(dropout, nn.Linear(DIM, CLASSES)).double(), max_steps=2, batch_size=16, accumulation=2
    ).fit()
    return drawn


def test_micro_batches_of_all_steps_and_ranks_draw_differently():
    drawn = [mask for of_rank in run_distributed(dropped_by_micro_batch, 2) for mask in of_rank]
    assert len(drawn) == 2 * 2 * 2
    assert len({tuple(mask[0].tolist() + mask[1].tolist()) for mask in drawn}) == len(drawn)
