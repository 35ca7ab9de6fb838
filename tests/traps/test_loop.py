"""Loop traps: rates of schedulers that warm up, and parameters that are added after `prepare`."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.support.trainers import in_hook
from tests.traps.toys import toy_trainer
from toolkit.train.optim import initial_rates


def test_scheduler_with_warmup_sets_a_rate_of_0_before_its_first_step():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert initial_rates(optimizer) == [0.5]


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
