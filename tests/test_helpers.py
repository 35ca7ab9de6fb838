"""The helper that all parallel tests stand on: failures fail, hangs are killed."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_distributed


def add_up_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_every_rank_answers():
    assert run_distributed(add_up_ranks, 3) == [3.0, 3.0, 3.0]


def test_a_failing_rank_fails_the_call_with_its_traceback():
    with pytest.raises(AssertionError, match=r"rank 1 of 2 raised:(.|\n)*rank one is unwell"):
        run_distributed(fail_on_rank_one, 2)


def test_a_hanging_rank_is_killed():
    with pytest.raises(AssertionError, match=r"rank\(s\) \[0\] of 2 gave no answer"):
        run_distributed(hang_on_rank_zero, 2, timeout_s=5)
