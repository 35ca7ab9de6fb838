"""Imbalance by hand."""

import numpy as np
import pytest

from toolkit.experts.placement.loads import expert_imbalance, max_over_mean


def test_max_over_mean_of_steps_differs_from_the_mean_load():
    load = np.array([[2, 0], [0, 2], [0, 0]])
    assert max_over_mean(load).tolist() == [2.0, 2.0, 1.0]
    assert max_over_mean(load.mean(0)) == 1.0


def test_expert_imbalance_by_hand():
    even = expert_imbalance([5, 5, 5, 5])
    assert (even.max_violation, even.variation) == (0.0, 0.0)
    assert even.entropy == pytest.approx(1.0)
    # Half and half of four: ln 2 / ln 4.
    half = expert_imbalance([6, 6, 0, 0])
    assert (half.max_violation, half.variation) == (1.0, 1.0)
    assert half.entropy == pytest.approx(0.5)
    assert expert_imbalance([7, 0]).entropy == 0.0
    assert expert_imbalance([0, 0]).max_violation == 0.0
