"""Who is born where, who merges, who ends, who moves: pure functions of what was measured."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.moe.lifecycle.test_roster import a_history
from toolkit.moe.lifecycle.plans import free_logical_id, plan_growth, plan_merges, plan_places, plan_prunes
from toolkit.moe.lifecycle.roster import ExpertRoster
from toolkit.placement.placement import initial_placement

FOUR_ON_TWO = initial_placement(8, 2, "round_robin")


def test_a_newborn_sits_on_the_rank_that_has_the_fewest() -> None:
    roster = ExpertRoster.initial(4, 8)  # seats 0 and 2 on rank 0, 1 and 3 on rank 1
    assert free_logical_id(roster, FOUR_ON_TWO) == 4
    assert free_logical_id(roster.grow(4, step=1), FOUR_ON_TWO) == 5
    assert free_logical_id(roster.prune(1, step=1), FOUR_ON_TWO) == 1
    assert free_logical_id(ExpertRoster.initial(8, 8), FOUR_ON_TWO) is None


def test_who_answers_for_most_of_what_is_not_covered_is_halved() -> None:
    roster = ExpertRoster.initial(4, 8)
    plan = plan_growth(roster, FOUR_ON_TWO, {0: 1.0, 2: 3.5, 3: 3.5})
    assert plan is not None
    assert (plan.parent, plan.logical_id, plan.fresh) == (2, 4, False)
    assert plan_growth(roster, FOUR_ON_TWO, {}) is None
    assert plan_growth(ExpertRoster.initial(8, 8), FOUR_ON_TWO, {0: 1.0}) is None


def test_pairs_merge_closest_first_and_each_expert_once() -> None:
    roster = ExpertRoster.initial(5, 5)
    distance = {(0, 1): 0.1, (0, 2): 0.05, (1, 2): 0.2, (3, 4): 0.9}
    alike = dict.fromkeys(distance, 0.95)
    traffic = {0: 1.0, 1: 5.0, 2: 3.0, 3: 1.0, 4: 1.0}
    limits = {"most_distance": 0.3, "least_similarity": 0.8}
    plans = plan_merges(roster, distance, alike, traffic, min_experts=2, **limits)
    assert [(plan.id, plan.into, plan.share) for plan in plans] == [(0, 2, 0.75)]
    assert plan_merges(roster, distance, alike, traffic, min_experts=5, **limits) == []
    unlike = dict.fromkeys(distance, 0.1)
    assert plan_merges(roster, distance, unlike, traffic, min_experts=2, **limits) == []


def test_of_equal_traffic_the_older_one_stays() -> None:
    (plan,) = plan_merges(
        ExpertRoster.initial(2, 2),
        {(0, 1): 0.0},
        {(0, 1): 1.0},
        {0: 0.0, 1: 0.0},
        most_distance=0.1,
        least_similarity=0.9,
        min_experts=1,
    )
    assert (plan.id, plan.into, plan.share) == (1, 0, 0.5)


def test_the_least_used_end_first_and_the_young_and_the_spared_stay() -> None:
    roster = ExpertRoster.initial(5, 6).grow(5, step=90)
    traffic = {0: 100.0, 1: 1.0, 2: 0.0, 3: 2.0, 4: 100.0, 5: 0.0}
    limits = {"step": 100, "below": 0.1, "min_age": 20}
    assert [plan.id for plan in plan_prunes(roster, traffic, min_experts=2, **limits)] == [2, 1, 3]
    assert [plan.id for plan in plan_prunes(roster, traffic, min_experts=2, spared=[1], **limits)] == [2, 3]
    assert [plan.id for plan in plan_prunes(roster, traffic, min_experts=5, **limits)] == [2]
    assert plan_prunes(roster, dict.fromkeys(range(6), 0.0), min_experts=2, **limits) == []


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.sampled_from([1, 2, 4]))
def test_ranks_get_equally_many_living_experts_by_as_few_moves_as_that_takes(seed: int, ranks: int) -> None:
    draws = random.Random(seed)
    roster, placement = a_history(draws, 8, 30)[-1], initial_placement(8, ranks, "round_robin")
    sits = {record.logical_id for record in roster.active}

    def active(places: object) -> list[int]:
        return [len(sits & set(row)) for row in places.slots]  # type: ignore[attr-defined]

    together = np.array([[draws.random() for _ in range(8)] for _ in range(8)])
    after = plan_places(roster, placement, together + together.T)
    assert max(active(after)) - min(active(after)) <= 1
    assert sorted(logical_id for row in after.slots for logical_id in row) == list(range(8))
    moved = sum(
        logical_id in sits and after.owner(logical_id).rank != placement.owner(logical_id).rank
        for logical_id in range(8)
    )
    surplus = sum(max(0, count - -(-len(roster) // ranks)) for count in active(placement))
    lack = sum(max(0, len(roster) // ranks - count) for count in active(placement))
    assert moved == max(surplus, lack)


def test_who_has_least_to_do_with_the_others_moves() -> None:
    roster = ExpertRoster.initial(4, 8, sitting=(0, 2, 4, 1))  # three on rank 0, one on rank 1
    roster = roster.grow(6, step=1)
    together = np.zeros((8, 8))
    for a, b, tokens in [(0, 2, 9), (2, 4, 9), (6, 1, 5)]:
        together[a, b] = together[b, a] = tokens
    after = plan_places(roster, FOUR_ON_TWO, together)
    assert after.owner(6).rank == 1
    assert [after.owner(logical_id).rank for logical_id in (0, 2, 4, 1)] == [0, 0, 0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_even_population_stays_where_it_is(ranks: int) -> None:
    placement = initial_placement(8, ranks, "round_robin")
    assert plan_places(ExpertRoster.initial(4, 8), placement) == placement
