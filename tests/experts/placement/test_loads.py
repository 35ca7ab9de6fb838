"""Imbalance by hand, and bounds that no placement beats."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.experts.placement.loads import expert_imbalance, max_over_mean, rank_imbalance, shares
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.placement import contiguous as blocks
from toolkit.experts.placement.planners.bounds import lower_bound


def test_rank_imbalance_by_hand():
    # Rank 0 bears 3 + half of 4, rank 1 bears 1 + half of 4: 5 / 4.
    placement = ExpertPlacement(((0, 2), (1, 2)))
    assert rank_imbalance([3, 1, 4], placement) == 1.25
    assert rank_imbalance([0, 0, 0], placement) == 1.0
    assert shares(placement).tolist() == [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]


def test_imbalance_is_taken_per_step_before_any_mean():
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


def test_bounds_by_hand():
    # The heaviest must share its rank with one other, as all slots are needed: 8 + 1 of 16 in all.
    assert lower_bound([8, 5, 2, 1], blocks(4, 2)) == 9 / 8
    # With a spare slot on the other rank it may be alone; the other three make 8 as well.
    assert lower_bound([8, 5, 2, 1], ExpertPlacement(((0, 1), (2, 3, -1)))) == 1.0
    # Three alike on two ranks: two share one.
    assert lower_bound([4, 4, 4], ExpertPlacement(((0, 1), (2, -1)))) == 8 / 6
    # Five alike on two ranks: three share one.
    assert lower_bound([1] * 5, ExpertPlacement(((0, 1, 2), (3, 4, -1)))) == 3 / 2.5
    # One spare slot: 12 becomes 6 and 6, of a mean of 8; without it, 12 and a half.
    spare = ExpertPlacement(((0, 1), (2, -1)))
    assert lower_bound([12, 2, 2], spare) == 12 / 8
    assert lower_bound([12, 2, 2], spare, replicas=True) == 1.0
    assert lower_bound([0, 0, 0], spare) == 1.0


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[ExpertPlacement, list[int]]:
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) > 0))
    experts = draw(st.integers(1, min(5, sum(sizes))))
    rows, ids = [], iter(range(experts))
    for size in sizes:
        rows.append(tuple(next(ids, -1) for _ in range(size)))
    return ExpertPlacement(tuple(rows)), draw(st.lists(st.integers(0, 20), min_size=experts, max_size=experts))


@settings(max_examples=100)
@given(small_cases(), st.booleans())
def test_no_placement_beats_the_bound_and_a_search_comes_close_to_the_best(
    case: tuple[ExpertPlacement, list[int]], replicas: bool
):
    """All placements are tried."""
    placement, load = case
    ranks, room = range(placement.ranks), [len(row) for row in placement.slots]
    homes = [
        home for n in range(1, (placement.ranks if replicas else 1) + 1) for home in itertools.combinations(ranks, n)
    ]
    best = float("inf")
    for choice in itertools.product(homes, repeat=len(load)):
        if all(sum(rank in home for home in choice) <= room[rank] for rank in ranks):
            load_R = [sum(w / len(home) for w, home in zip(load, choice, strict=True) if r in home) for r in ranks]
            best = min(best, max(load_R))
    mean = sum(load) / placement.ranks
    optimum = best / mean if mean else 1.0
    bound = lower_bound(load, placement, replicas=replicas)
    assert bound <= optimum * (1 + 1e-9)
    searched = lower_bound(load, placement, replicas=replicas, search=2000)
    assert bound <= searched <= optimum * (1 + 1e-9)
    assert searched >= optimum / 1.003
