"""What Accelerate and DDP do to schedulers, buffers and late parameters, and what stands in their place here."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from tests.support.helpers import run_distributed
from tests.traps.toys import ToyMixture, toy_data, toy_trainer
from toolkit.errors import UserError
from toolkit.experts.layer.losses import global_load
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.integrations.accelerate.prepare import prepare
from toolkit.train.callbacks.base import Callback
from toolkit.train.optim import initial_rates
from toolkit.train.trainer import Trainer

# --- schedulers -----------------------------------------------------------------------------------------------------


def rates_over_two_steps() -> dict[str, Any]:
    weight = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    _, optimizer, scheduler = Accelerator().prepare(weight, optimizer, scheduler)
    plain = []
    for _ in range(2):
        plain.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()

    ours: list[float] = []

    class Rates(Callback):
        def on_before_optimizer_step(self, trainer: Trainer) -> None:
            ours.append(trainer.optimizer.param_groups[0]["lr"])

    toy_trainer(max_steps=2, schedule=lambda step: 0.5**step, lr=1.0, callbacks=[Rates()]).fit()
    return {"plain": plain, "ours": ours}


def test_a_prepared_scheduler_steps_once_per_process_and_our_rate_is_a_function_of_the_step():
    for answer in run_distributed(rates_over_two_steps, 2):
        assert answer["plain"] == [1.0, 0.25], "one step taken, two counted"
        assert answer["ours"] == [1.0, 0.5]


def test_a_scheduler_with_a_warmup_leaves_a_rate_of_0_and_ours_takes_the_one_from_before():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0.0, "a loop that does not step the scheduler learns nothing"

    assert initial_rates(optimizer) == [0.5]
    with pytest.raises(UserError, match="the learning rate of every group is 0"):
        initial_rates(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.0))


# --- buffers --------------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Counts its samples in a buffer, as usage statistics are usually kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.linear(x)


def counters_after_two_forwards() -> dict[str, Any]:
    plain = Counter()
    prepared = Accelerator().prepare(plain)
    mixture = ToyMixture(make_expert_groups(dist.get_world_size()))
    ours, _ = prepare(Accelerator(), mixture, torch.optim.SGD(mixture.parameters()))
    mine = 2 + dist.get_rank()
    for _ in range(2):
        prepared(torch.ones(mine, 1))
        ours(toy_data()[0][:mine])
    return {
        "plain": plain.seen.item(),
        "ours": int(mixture.moe.load_E.sum()),
        "last_of_all": int(global_load([mixture.moe]).sum()),
    }


def test_ddp_overwrites_counters_kept_as_buffers_and_our_statistics_are_plain_attributes():
    first, second = run_distributed(counters_after_two_forwards, 2)
    assert (first["plain"], second["plain"]) == (4, 5), "rank 1 saw 3 and 3, and was told that it had seen 2 before"
    assert (first["ours"], second["ours"]) == (2 * 2 * 2, 2 * 3 * 2), "forwards x samples x top-k"
    assert first["last_of_all"] == second["last_of_all"] == (2 + 3) * 2


# --- a parameter that comes late ------------------------------------------------------------------------------------


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 3).double()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


class Grow(Callback):
    """Adds a parameter in the middle of training."""

    def on_step_end(self, trainer: Trainer) -> None:
        trainer.raw_model.branches.append(nn.Linear(6, 3).double())


def late_parameter() -> dict[str, Any]:
    model = Growing()
    accelerator = Accelerator()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model.branches.append(late := nn.Linear(6, 3).double())
    accelerator.backward(prepared(torch.full((1, 6), 2.0 + 2 * dist.get_rank(), dtype=torch.float64)).sum())
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    with pytest.raises(ValueError, match=r"branches\.1\.(weight|bias)") as refusal:
        toy_trainer(Growing(), max_steps=3, callbacks=[Grow()]).fit()
    return {
        "gradient": late.weight.grad[0, 0].item(),
        "in_optimizer": id(late.weight) in known,
        "refusal": str(refusal.value),
    }


def test_a_parameter_added_after_preparation_is_never_trained_nor_synchronised_and_ours_refuses_it():
    answers = run_distributed(late_parameter, 2)
    assert [a["gradient"] for a in answers] == [2.0, 4.0], "each rank has its own"
    assert not any(a["in_optimizer"] for a in answers)
    assert all("after the model was prepared" in a["refusal"] for a in answers)
