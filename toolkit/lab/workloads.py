"""Synthetic loads to test planners on, each with one kind of imbalance.

Each is a pure function of its arguments to an int64 array (steps, S, E): the assignments of each source rank to each
expert. They are drawn independently, so a token may choose an expert twice: use them as loads only. The set W0 to W7
follows the proposal of Megatron-LM's pull request 7488.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from toolkit.experts.placement.loads import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters of all workloads."""

    steps: int = 200
    ranks: int = 8
    experts: int = 64
    assignments: int = 4096
    """Assignments of one source rank in one step (tokens times top-k)."""
    heat: float = 6.0
    """Load of a hot expert over that of another."""
    seed: int = 0

    @property
    def hot(self) -> int:
        """Number of hot experts: as many as a rank has on average."""
        return max(1, self.experts // self.ranks)


def _draw(sizes: Sizes, weights: Floats, assignments_S: Ints | None = None) -> Ints:
    """Assignments drawn by `weights`, which broadcast to (steps, S, E); `assignments_S`: how many each source has."""
    shape = (sizes.steps, sizes.ranks, sizes.experts)
    weights = np.broadcast_to(weights, shape)
    assignments = np.full(sizes.ranks, sizes.assignments) if assignments_S is None else assignments_S
    rng = np.random.default_rng(sizes.seed)
    return rng.multinomial(np.broadcast_to(assignments, shape[:2]), weights / weights.sum(-1, keepdims=True))


def _heated(sizes: Sizes, hot: Ints) -> Floats:
    weights = np.ones(sizes.experts)
    weights[hot] = sizes.heat
    return weights


def balanced(sizes: Sizes) -> Ints:
    """Equal experts: the control, which no plan should change."""
    return _draw(sizes, np.ones(sizes.experts))


def hot_experts(sizes: Sizes) -> Ints:
    """A random set of experts is hot."""
    ids = np.random.default_rng([sizes.seed, 1]).permutation(sizes.experts)
    return _draw(sizes, _heated(sizes, ids[: sizes.hot]))


def hot_rank(sizes: Sizes) -> Ints:
    """Makes as many experts hot, in one consecutive block: all on the first rank under a contiguous placement."""
    return _draw(sizes, _heated(sizes, np.arange(sizes.hot)))


def spread_heat(sizes: Sizes) -> Ints:
    """Makes as many experts hot, evenly spaced: a contiguous placement is balanced already."""
    return _draw(sizes, _heated(sizes, np.arange(sizes.hot) * (sizes.experts // sizes.hot)))


def ragged_sources(sizes: Sizes) -> Ints:
    """Equal experts and unequal sources: the first sends most, the last an R-th of that."""
    parts = 1 / np.arange(1, sizes.ranks + 1)
    return _draw(
        sizes, np.ones(sizes.experts), (parts / parts.sum() * sizes.ranks * sizes.assignments).astype(np.int64)
    )


def zero_tokens(sizes: Sizes) -> Ints:
    """A consecutive block of experts and every fifth one get nothing, and the last source sends nothing."""
    weights = np.ones(sizes.experts)
    weights[: sizes.hot] = 0
    weights[::5] = 0
    if not weights.any():
        weights[-1] = 1
    assignments = np.full(sizes.ranks, sizes.assignments)
    assignments[-1] = 0
    return _draw(sizes, weights, assignments)


def rotating_hotspot(sizes: Sizes, *, period: int = 50) -> Ints:
    """A consecutive block is hot, and the next block after `period` steps: plans become outdated."""
    blocks = max(1, sizes.experts // sizes.hot)
    first = np.arange(sizes.steps) // period % blocks * sizes.hot
    weights = np.stack([_heated(sizes, np.arange(f, f + sizes.hot)) for f in first])
    return _draw(sizes, weights[:, None])


def burst(sizes: Sizes, *, length: int = 10) -> Ints:
    """Balanced, except for `length` steps in the middle in which the first block is hot: too short for a plan to
    gain."""
    weights = np.ones((sizes.steps, 1, sizes.experts))
    start = sizes.steps // 2
    weights[start : start + length, :, : sizes.hot] = sizes.heat
    return _draw(sizes, weights)


def drifting(sizes: Sizes, *, skew: float = 0.6, sigma: float = 0.05) -> Ints:
    """Zipf weights of exponent `skew` in random order, whose logarithms do a random walk of `sigma` per step."""
    rng = np.random.default_rng([sizes.seed, 2])
    start = -skew * np.log(rng.permutation(sizes.experts) + 1.0)
    walk = rng.normal(0.0, sigma, (sizes.steps, sizes.experts)).cumsum(0)
    return _draw(sizes, np.exp(start + walk)[:, None])


WORKLOADS: dict[str, Callable[[Sizes], Ints]] = {
    "W0": balanced,
    "W1": hot_experts,
    "W2": hot_rank,
    "W3": spread_heat,
    "W4": ragged_sources,
    "W5": zero_tokens,
    "W6": rotating_hotspot,
    "W7": burst,
}
