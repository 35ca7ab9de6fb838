"""What a sleep judges a change by."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.helpers import run_distributed
from toolkit.dynamic.probe import Probe


def probe(losses: Tensor) -> Probe:
    return Probe(losses, (), len(losses), float(losses.mean()), 0.0)


def losses(mean: float, spread: float, samples: int = 512) -> Tensor:
    """Of which half are below the mean by `spread`, and half above it."""
    return mean + spread * torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(samples // 2)


BEFORE = probe(losses(1.0, 0.0))


@pytest.mark.parametrize(
    ("after", "worse"),
    [
        (losses(0.9, 0.0), False),
        (losses(1.09, 0.0), False),
        (losses(1.11, 0.0), True),
        (losses(1.2, 2.3), False),  # a rise of 0.2 with a standard error of 0.1017
        (losses(1.21, 2.3), True),
        (losses(1.6, 20.0), False),  # 0.6 with one of 0.88
        (losses(1.7, 20.0), True),  # more than ln 2
        (torch.cat([losses(1.0, 0.0, 510), losses(5e5, 0.0, 2)]), True),  # 2 of 512 samples, far out
        (losses(math.nan, 0.0), True),
        (losses(math.inf, 0.0), True),
    ],
)
def test_a_change_is_worse_beyond_what_is_allowed_and_what_chance_makes(after: Tensor, worse: bool) -> None:
    assert probe(after).is_worse(BEFORE, 0.1) is worse


def judged_on_ranks() -> list[bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    before = replace(BEFORE, losses_T=BEFORE.losses_T[rank::world])
    wholes = [probe(losses(mean, 2.3)) for mean in (1.2, 1.21)]
    return [replace(whole, losses_T=whole.losses_T[rank::world]).is_worse(before, 0.1) for whole in wholes]


def test_ranks_that_hold_parts_of_the_samples_agree_with_one_that_holds_all() -> None:
    assert run_distributed(judged_on_ranks, 2) == [[False, True]] * 2
