"""Loads that walk at random."""

from __future__ import annotations

import numpy as np

from toolkit.lab.workloads import Ints, Sizes, draw


def drifting(sizes: Sizes, *, skew: float = 0.6, sigma: float = 0.05) -> Ints:
    """Draw by Zipf weights of exponent `skew` in random order, whose logarithms walk at random by `sigma` per step."""
    rng = np.random.default_rng([sizes.seed, 2])
    start = -skew * np.log(rng.permutation(sizes.experts) + 1.0)
    walk = rng.normal(0.0, sigma, (sizes.steps, sizes.experts)).cumsum(0)
    return draw(sizes, np.exp(start + walk)[:, None])
