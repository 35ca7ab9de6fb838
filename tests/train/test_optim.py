"""Optimizers against torch's with hand-made groups, and schedules against their formulas."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

import toolkit as tk
from toolkit.errors import UserError
from toolkit.run.config.optimizer_options import ScheduleOptions
from toolkit.train.optim import build_optimizer, build_schedule, initial_rates

STEPS = 20


def cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "constant", "warmup_steps": 3}, {0: 1 / 4, 1: 2 / 4, 2: 3 / 4, 3: 1, 50: 1}),
        ({"kind": "cosine"}, {0: 1, 5: cosine(5 / 20), 10: 0.5, 20: 0, 50: 0}),
        ({"kind": "cosine", "warmup_steps": 2}, {11: 0.5, 5: cosine(3 / 18), 20: 0, 2: 1, 1: 2 / 3, 0: 1 / 3}),
        ({"kind": "cosine", "warmup_epochs": 0.5}, {0: 1 / 5, 3: 4 / 5, 4: 1, 8: cosine(4 / 16), 20: 0}),
        ({"kind": "stable_decay"}, {0: 1, 16: 1, 18: 0.5}),
        ({"kind": "stable_decay", "warmup_steps": 1}, {0: 1 / 2, 1: 1, 16: 1, 17: 3 / 4, 19: 1 / 4, 20: 0, 50: 0}),
    ],
)
def test_build_schedule_equals_formula(options, expected):
    schedule = build_schedule(ScheduleOptions(**options), max_steps=STEPS, steps_per_epoch=8)
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)


def test_build_optimizer_equals_adamw_that_decays_matrices_only():
    torch.manual_seed(0)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    moe = tk.experts.make_moe(6, 5, num_experts=4, top_k=2)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), moe, nn.Linear(6, 3), frozen)
    reference = deepcopy(model)
    names = {"0.weight", "2.router.weight", "2.experts.up", "2.experts.down", "3.weight"}
    matrices = [p for name, p in reference.named_parameters() if name in names]
    vectors = [p for name, p in reference.named_parameters() if name in {"0.bias", "1.weight", "1.bias", "3.bias"}]
    groups = [{"params": matrices, "weight_decay": 0.7}, {"params": vectors, "weight_decay": 0.0}]
    config = tk.RunConfig(lr=0.1, batch_size=8, scale_lr=16, optimizer=tk.OptimizerOptions(weight_decay=0.7))
    for net, optimizer in [
        (model, build_optimizer(model, config)),
        (reference, torch.optim.AdamW(groups, lr=0.1 * 8 / 16, betas=(0.9, 0.999), eps=1e-8)),
    ]:
        inputs = torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(1))
        for x in inputs:
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_initial_rates_of_all_zero_raise():
    weight = nn.Linear(1, 1)
    with pytest.raises(UserError, match="the learning rate of every group is 0"):
        initial_rates(torch.optim.SGD(weight.parameters(), lr=0.0))
    warming_up = torch.optim.SGD(weight.parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(warming_up, lambda step: step / 10)
    assert warming_up.param_groups[0]["lr"] == 0.0
    assert initial_rates(warming_up) == [0.5]
    groups = [{"params": [weight.weight], "lr": 0.0}, {"params": [weight.bias]}]
    assert initial_rates(torch.optim.SGD(groups, lr=0.1)) == [0.0, 0.1]
