"""Optimizer steps that would train experts wrongly raise on all ranks behind each door: `ExpertParallel`, `Trainer` and
`ExpertSync` on torch only."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

from benchmarks.support.processes import run_distributed
from tests.experts.parallel.test_optimizer_rows import LayerwiseRate
from tests.integrations.accelerate.toy import error_of, sgd
from tests.support.trainers import in_hook
from tests.traps.toys import ToyMoE, local_loss, toy_data, toy_trainer
from toolkit.errors import UserError
from toolkit.experts.compat import default_store
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

MakeOptimizer = Callable[[nn.Module], Optimizer]
Change = Callable[[Any, Optimizer], object]
"""Changes model and optimizer before the update."""


class Toy(ToyMoE):
    skips_experts = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).relu()) if self.skips_experts else super().forward(x)


def step_by_expert_parallel(model: Toy, make_optimizer: MakeOptimizer, change: Change) -> None:
    accelerator, inner = Accelerator(cpu=True), make_optimizer(model)
    wrapped, optimizer = ExpertParallel(accelerator).prepare(model, inner)
    accelerator.backward(local_loss(wrapped))
    change(model, inner)
    optimizer.step()


def step_by_trainer(model: Toy, make_optimizer: MakeOptimizer, change: Change) -> None:
    shard_experts(model)
    callback = in_hook("on_before_optimizer_step", lambda t: change(model, t.optimizer.optimizer))
    toy_trainer(model, max_steps=1, make_optimizer=make_optimizer, callbacks=[callback]).fit()


def step_on_torch(model: Toy, make_optimizer: MakeOptimizer, change: Change) -> None:
    shard_experts(model)
    optimizer, wrapped = make_optimizer(model), DistributedDataParallel(model)
    sync = ExpertSync(wrapped, optimizer)
    local_loss(wrapped).backward()
    sync.clip(model.parameters(), 1.0)
    change(model, optimizer)
    optimizer.step()


DOORS = {"ExpertParallel": step_by_expert_parallel, "Trainer": step_by_trainer, "torch only": step_on_torch}


def sgd_of_another_parameter(model: nn.Module) -> Optimizer:
    return SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)


def sgd_without_experts(model: nn.Module) -> Optimizer:
    return SGD([p for name, p in model.named_parameters() if "experts" not in name], lr=0.1)


def assign_gradients(model: Any, _: Optimizer) -> None:
    for parameter in model.moe.experts.parameters():
        parameter.grad = torch.ones_like(parameter)


def change_a_gradient_on_rank_1(model: Any, _: Optimizer) -> None:
    model.head.weight.grad[0, 0] += 0.01 * dist.get_rank()


def change_a_weight_on_rank_1(model: Any, _: Optimizer) -> None:
    model.head.weight.data[0, 0] += 0.01 * dist.get_rank()


def reduce_experts_by_hand(value_of: Callable[[Tensor], Tensor | None], *, average: bool) -> Change:
    """Return a change that averages gradients or weights of all parameters, or broadcasts rank 0's."""

    def change(model: Any, _: Optimizer) -> None:
        for parameter in model.parameters():
            value = value_of(parameter)
            assert value is not None
            dist.all_reduce(value) if average else dist.broadcast(value, 0)
            value.div_(dist.get_world_size() if average else 1)

    return change


def load_the_state_of_rank_0(_: Any, optimizer: Optimizer) -> None:
    states: list[Any] = [optimizer.state_dict() | {"state": {0: {}}}]
    dist.broadcast_object_list(states)
    is_loaded = not error_of(optimizer.load_state_dict, states[0])
    raise UserError(f"loaded on {'all ranks' if dist.get_rank() and is_loaded else 'the rank that saved it'}")


def keep(_: Any, __: Optimizer) -> None:
    """Change nothing."""


EQUAL = "the {} of 2 parameter(s) of experts, first 'moe.experts.down', are equal on ranks with different experts"
GUARDS: dict[str, tuple[MakeOptimizer, Change, str]] = {
    "coupled optimizer": (lambda m: LayerwiseRate(m.parameters(), lr=0.1), keep, "statistics of several experts"),
    "foreign parameter": (sgd_of_another_parameter, keep, "(2,) in group 0 that is not in the model"),
    "missing experts": (sgd_without_experts, keep, "moe.experts.up'"),
    "assigned gradients": (sgd, assign_gradients, "assigned without a backward pass"),
    "different gradients": (
        sgd,
        change_a_gradient_on_rank_1,
        "gradients of 1 parameter(s), first 'head.weight'",
    ),
    "different weights": (sgd, change_a_weight_on_rank_1, "weights of 1 parameter(s), first 'head.weight', differ"),
    "averaged gradients": (sgd, reduce_experts_by_hand(lambda p: p.grad, average=True), EQUAL.format("gradients")),
    "gradients of rank 0": (sgd, reduce_experts_by_hand(lambda p: p.grad, average=False), EQUAL.format("gradients")),
    "averaged weights": (sgd, reduce_experts_by_hand(lambda p: p.data, average=True), EQUAL.format("weights")),
    "weights of rank 0": (sgd, reduce_experts_by_hand(lambda p: p.data, average=False), EQUAL.format("weights")),
    "norm of one rank's experts": (
        sgd,
        lambda model, _: clip_grad_norm_(model.moe.experts.parameters(), 1.0),
        "clip_grad_norm_: the norm of torch.nn.utils has only this rank's experts",
    ),
    "another optimizer": (sgd, lambda model, _: sgd(model).step(), "were prepared with another optimizer"),
    "state of another rank": (sgd, load_the_state_of_rank_0, "loaded on the rank that saved it"),
}


def errors_behind_doors() -> dict[tuple[str, str], str]:
    errors = {}
    for guard, (make_optimizer, change, _) in GUARDS.items():
        for door, step in DOORS.items():
            model = Toy(ExpertGroups())
            model.skips_experts = guard == "assigned gradients"
            errors[guard, door] = error_of(step, model, make_optimizer, change)
    return errors


@pytest.fixture(scope="module")
def errors() -> list[dict[tuple[str, str], str]]:
    return run_distributed(errors_behind_doors, 2)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("guard", GUARDS)
def test_step_that_trains_experts_wrongly_raises_behind_each_door(
    guard: str, door: str, errors: list[dict[tuple[str, str], str]]
) -> None:
    first, second = (rank[guard, door] for rank in errors)
    assert first == second
    assert GUARDS[guard][2] in first


def clipped_by_value(is_late: bool) -> Tensor:
    """Return expert gradients that torch clips by value, averaged before the call or, if `is_late`, in it."""
    model = Toy(ExpertGroups())
    shard_experts(model, make_expert_groups(2))
    sync = ExpertSync(DistributedDataParallel(model), sgd(model))
    local_loss(model).backward()
    if not is_late:
        sync.before_clip()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    sync.before_clip()
    return model.moe.experts.up.grad


def test_clip_grad_value_averages_gradients_over_ranks_first() -> None:
    averaged, late = (run_distributed(clipped_by_value, 4, is_late) for is_late in (False, True))
    for once, again in zip(averaged, late, strict=True):
        assert torch.equal(once, again)
        assert once.abs().max() == 0.01


def errors_of_calls_on_rank_0(folder: Path) -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    model = Toy(ExpertGroups())
    parallel = ExpertParallel(accelerator)
    model, _ = parallel.prepare(model, sgd(model))
    parallel.metrics()
    default_store().set_timeout(timedelta(seconds=0.2))
    calls: dict[str, Callable[[], object]] = {
        "metrics": parallel.metrics,
        "save": lambda: parallel.save(folder),
        "load": lambda: parallel.load(folder),
        "whole_state_dict": lambda: accelerator.get_state_dict(model),
        "join": lambda: parallel.join().__enter__(),
        "evaluation": lambda: torch.no_grad()(model)(toy_data()[0]),
    }
    return {name: error_of(call) for name, call in calls.items() if accelerator.is_main_process}


def test_call_on_one_rank_raises_and_names_the_missing_rank(tmp_path: Path) -> None:
    errors, _ = run_distributed(errors_of_calls_on_rank_0, 2, tmp_path)
    assert len(errors) == 6
    for name, error in errors.items():
        assert error == f"{name}: rank 1 did not come within 0:00:00.180000. Call it on every rank."


def test_expert_sync_of_parameters_raises() -> None:
    with pytest.raises(UserError, match=r"^model: is of type generator. Write ExpertSync\(model, optimizer\)"):
        ExpertSync(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]
