"""Imbalance of synthetic loads."""

from dataclasses import replace

import numpy as np
import pytest

from toolkit.experts.placement.loads import expert_imbalance, rank_imbalance
from toolkit.experts.placement.placement import contiguous
from toolkit.lab.workloads import WORKLOADS, Sizes, burst, rotating_hotspot

SIZES = Sizes(steps=40, ranks=4, experts=16, pairs=1000)
CONTIGUOUS = contiguous(16, 4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_depends_only_on_its_sizes(name: str):
    load = WORKLOADS[name](SIZES)
    assert load.shape == (40, 4, 16)
    assert load.dtype == np.int64
    assert load.min() >= 0
    assert (load == WORKLOADS[name](SIZES)).all()
    assert (load != WORKLOADS[name](replace(SIZES, seed=1))).any()
    assert WORKLOADS[name](Sizes(steps=2, ranks=3, experts=1)).shape == (2, 3, 1)
    if name not in ("W4", "W5"):
        assert (load.sum(-1) == 1000).all()


def imbalance(name: str) -> float:
    return rank_imbalance(WORKLOADS[name](SIZES).sum((0, 1)), CONTIGUOUS)


def test_hot_experts_on_one_rank_are_imbalanced():
    assert imbalance("W0") < 1.03
    # The 4 hot of 16 experts, on one rank of 4, receive 24 of 36 pairs.
    assert imbalance("W2") == pytest.approx(24 / 36 * 4, rel=0.02)
    assert imbalance("W3") < 1.03
    heat = [expert_imbalance(WORKLOADS[name](SIZES).sum((0, 1))).max_violation for name in ("W1", "W2", "W3")]
    assert heat == pytest.approx([1.67] * 3, rel=0.05)


def test_ragged_sources_have_balanced_experts():
    load = WORKLOADS["W4"](SIZES)
    sent = load.sum((0, 2))
    assert sent[0] / sent[-1] == pytest.approx(4, rel=0.01)
    assert expert_imbalance(load.sum((0, 1))).max_violation < 0.05


def test_zero_tokens_workload_has_idle_experts_and_an_idle_rank():
    load = WORKLOADS["W5"](SIZES)
    assert load[:, -1].sum() == 0
    assert load[:, :, :4].sum() == 0
    assert load[:, :, 5::5].sum() == 0
    assert load[:, :, 4].min(initial=1, where=np.array([True, True, True, False])) > 0


def test_hotspot_rotates_and_burst_ends():
    hottest = rotating_hotspot(SIZES, period=10).sum(1).argmax(-1) // 4
    assert hottest.tolist() == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10
    first_block = burst(SIZES, length=5).sum(1)[:, :4].sum(-1) / 4000
    hot = np.arange(40)[first_block > 0.5]
    assert hot.tolist() == [20, 21, 22, 23, 24]
