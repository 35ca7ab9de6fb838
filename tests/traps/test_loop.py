"""Loop traps: rates of schedulers that warm up, and parameters that are added after `prepare`."""

import pytest
import torch
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


def train_late_parameter() -> None:
    grow = in_hook("on_step_end", lambda trainer: trainer.raw_model.branches.append(nn.Linear(6, 3).double()))
    with pytest.raises(ValueError, match=r"branches\.1\.(weight|bias).* was added after the model was prepared"):
        toy_trainer(Growing(), max_steps=3, callbacks=[grow]).fit()


def test_parameter_added_after_prepare_raises():
    run_distributed(train_late_parameter, 2)
