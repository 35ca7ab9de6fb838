"""Loop traps: prepared schedulers, buffers under DDP, and parameters that are added after `prepare`."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.support.trainers import in_hook
from tests.traps.toys import ToyMoE, expert_groups, toy_data, toy_trainer
from toolkit.experts.layer.losses import global_load
from toolkit.integrations.accelerate.prepare import prepare
from toolkit.train.optim import initial_rates


def rates_of_two_steps() -> list[float]:
    weight = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    _, optimizer, scheduler = Accelerator().prepare(weight, optimizer, scheduler)
    rates = []
    for _ in range(2):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def test_prepared_scheduler_steps_once_per_process():
    assert run_distributed(rates_of_two_steps, 2) == [[1.0, 0.25]] * 2


def test_scheduler_with_warmup_sets_a_rate_of_0_before_its_first_step():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert initial_rates(optimizer) == [0.5]


class Counter(nn.Module):
    """Counts samples in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.linear(x)


def counts_of_two_forward_passes() -> tuple[int, int, int]:
    """Return the count in a buffer, and the local and global (token, expert) pairs of a MoE layer."""
    counter, model = Counter(), ToyMoE(expert_groups())
    prepared = Accelerator().prepare(counter)
    prepared_model, _ = prepare(Accelerator(), model, torch.optim.SGD(model.parameters()))
    samples = 2 + dist.get_rank()
    for _ in range(2):
        prepared(torch.ones(samples, 1))
        prepared_model(toy_data()[0][:samples])
    return int(counter.seen), int(model.moe.load_E.sum()), int(global_load([model.moe]).sum())


def test_ddp_overwrites_counters_in_buffers():
    first, second = run_distributed(counts_of_two_forward_passes, 2)
    assert first == (4, 2 * 2 * 2, (2 + 3) * 2)
    # The buffer of rank 1 is 2 after the broadcast before its second forward pass.
    assert second == (2 + 3, 2 * 3 * 2, (2 + 3) * 2)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 3).double()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


def train_late_parameter() -> tuple[float, bool]:
    """Return the gradient of a parameter that is added after `prepare`, and whether the optimizer has it."""
    model = Growing()
    accelerator = Accelerator()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model.branches.append(late := nn.Linear(6, 3).double())
    accelerator.backward(prepared(torch.full((1, 6), 2.0 + 2 * dist.get_rank(), dtype=torch.float64)).sum())
    grow = in_hook("on_step_end", lambda trainer: trainer.raw_model.branches.append(nn.Linear(6, 3).double()))
    with pytest.raises(ValueError, match=r"branches\.1\.(weight|bias).* was added after the model was prepared"):
        toy_trainer(Growing(), max_steps=3, callbacks=[grow]).fit()
    known = [p for group in optimizer.param_groups for p in group["params"]]
    return late.weight.grad[0, 0].item(), any(p is late.weight for p in known)


def test_parameter_added_after_prepare_is_neither_averaged_nor_trained():
    assert run_distributed(train_late_parameter, 2) == [(2.0, False), (4.0, False)]
