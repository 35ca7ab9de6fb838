"""Synthetic loads for tests of planners, each with one kind of imbalance.

Each workload is a pure function that returns pairs per rank and expert, int64 (steps, P, E). Pairs are drawn
independently, so a token can choose an expert twice: use them only as loads. W0 to W7 follow the proposal of
Megatron-LM's pull request 7488.
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
    pairs: int = 4096
    """(token, expert) pairs of one rank in one step."""
    heat: float = 6.0
    """Load of a hot expert divided by the load of other experts."""
    seed: int = 0

    @property
    def hot(self) -> int:
        """Number of hot experts: the number per rank."""
        return max(1, self.experts // self.ranks)


def draw(sizes: Sizes, weights: Floats, pairs_P: Ints | None = None) -> Ints:
    """Draw pairs by `weights`, which broadcast to (steps, P, E); `pairs_P`: pairs per rank."""
    shape = (sizes.steps, sizes.ranks, sizes.experts)
    weights = np.broadcast_to(weights, shape)
    pairs = np.full(sizes.ranks, sizes.pairs) if pairs_P is None else pairs_P
    rng = np.random.default_rng(sizes.seed)
    return rng.multinomial(np.broadcast_to(pairs, shape[:2]), weights / weights.sum(-1, keepdims=True))


def _heated(sizes: Sizes, hot: Ints) -> Floats:
    weights = np.ones(sizes.experts)
    weights[hot] = sizes.heat
    return weights


def balanced(sizes: Sizes) -> Ints:
    """Draw equal experts: the control, which no plan should change."""
    return draw(sizes, np.ones(sizes.experts))


def hot_experts(sizes: Sizes) -> Ints:
    """Heat a random set of experts."""
    ids = np.random.default_rng([sizes.seed, 1]).permutation(sizes.experts)
    return draw(sizes, _heated(sizes, ids[: sizes.hot]))


def hot_rank(sizes: Sizes) -> Ints:
    """Heat the same number of experts in one block: all on the first rank under a contiguous placement."""
    return draw(sizes, _heated(sizes, np.arange(sizes.hot)))


def spread_heat(sizes: Sizes) -> Ints:
    """Heat the same number of experts, evenly spaced: a contiguous placement is already balanced."""
    return draw(sizes, _heated(sizes, np.arange(sizes.hot) * (sizes.experts // sizes.hot)))


def ragged_sources(sizes: Sizes) -> Ints:
    """Draw equal experts from unequal ranks: the last rank sends 1/P of the first rank's pairs."""
    parts = 1 / np.arange(1, sizes.ranks + 1)
    return draw(sizes, np.ones(sizes.experts), (parts / parts.sum() * sizes.ranks * sizes.pairs).astype(np.int64))


def zero_tokens(sizes: Sizes) -> Ints:
    """Give no tokens to a block of experts and every fifth expert; the last rank sends none."""
    weights = np.ones(sizes.experts)
    weights[: sizes.hot] = 0
    weights[::5] = 0
    if not weights.any():
        weights[-1] = 1
    pairs = np.full(sizes.ranks, sizes.pairs)
    pairs[-1] = 0
    return draw(sizes, weights, pairs)


def rotating_hotspot(sizes: Sizes, *, period: int = 50) -> Ints:
    """Heat a block, and the next block after `period` steps: plans become outdated."""
    blocks = max(1, sizes.experts // sizes.hot)
    first = np.arange(sizes.steps) // period % blocks * sizes.hot
    weights = np.stack([_heated(sizes, np.arange(f, f + sizes.hot)) for f in first])
    return draw(sizes, weights[:, None])


def burst(sizes: Sizes, *, length: int = 10) -> Ints:
    """Heat the first block for `length` steps in the middle: too short for a plan to help."""
    weights = np.ones((sizes.steps, 1, sizes.experts))
    start = sizes.steps // 2
    weights[start : start + length, :, : sizes.hot] = sizes.heat
    return draw(sizes, weights)


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
