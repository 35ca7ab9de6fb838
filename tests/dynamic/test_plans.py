"""Rosters after random events, and plans to grow, merge, prune and move experts."""

import random
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.dynamic.plans import free_logical_id, plan_growth, plan_merges, plan_placement, plan_prunes, plan_sleep
from toolkit.dynamic.roster import ExpertRecord, ExpertRoster
from toolkit.experts.placement.placement import initial_placement

ROUND_ROBIN = initial_placement(8, 2, "round_robin")


def random_history(draws: random.Random, logical_experts: int, events: int) -> list[ExpertRoster]:
    """Return the rosters before and after each random event."""
    rosters = [ExpertRoster.initial(draws.randint(1, logical_experts), logical_experts)]
    for step in range(1, events + 1):
        now = rosters[-1]
        uids = [record.uid for record in now.active]
        choices = ["grow"] if now.inactive else []
        choices += ["merge", "prune"] if len(now) > 1 else []
        if not choices:
            break
        match draws.choice(choices):
            case "grow":
                now = now.grow(draws.choice(now.inactive), step=step, parent=draws.choice(uids))
            case "merge":
                removed, into = draws.sample(uids, 2)
                now = now.merge(removed, into=into, step=step)
            case _:
                now = now.prune(draws.choice(uids), step=step)
        rosters.append(now)
    return rosters


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), logical_experts=st.integers(1, 9))
def test_roster_never_reuses_uids_or_shares_logical_ids(seed, logical_experts):
    removed: set[int] = set()
    for before, after in pairwise(random_history(random.Random(seed), logical_experts, 30)):
        removed |= {record.uid for record in before.records} - {record.uid for record in before.active}
        assert not removed & {record.uid for record in after.active}
        assert 1 <= len(after) <= logical_experts
        assert len(after.inactive) + len(after) == logical_experts
        assert abs(len(after) - len(before)) == 1
        assert all(after.logical_id_of(record.uid) == record.logical_id for record in after.active)


def test_free_logical_id_is_on_the_rank_with_the_fewest_active_experts():
    roster = ExpertRoster.initial(4, 8)  # logical experts 0 and 2 on rank 0, 1 and 3 on rank 1
    assert free_logical_id(roster, ROUND_ROBIN) == 4
    assert free_logical_id(roster.grow(4, step=1), ROUND_ROBIN) == 5
    assert free_logical_id(roster.prune(1, step=1), ROUND_ROBIN) == 1
    assert free_logical_id(ExpertRoster.initial(8, 8), ROUND_ROBIN) is None


def test_plan_growth_splits_the_expert_with_the_most_uncovered_weight():
    roster = ExpertRoster.initial(4, 8)
    plan = plan_growth(roster, ROUND_ROBIN, {0: 1.0, 2: 3.5, 3: 3.5})
    assert plan is not None
    assert (plan.parent, plan.logical_id) == (2, 4)
    assert plan_growth(roster, ROUND_ROBIN, {}) is None
    assert plan_growth(ExpertRoster.initial(8, 8), ROUND_ROBIN, {0: 1.0}) is None


def test_plan_merges_takes_the_closest_pairs_first_and_each_expert_once():
    roster = ExpertRoster.initial(5, 5)
    distance = {(0, 1): 0.1, (0, 2): 0.05, (1, 2): 0.2, (3, 4): 0.9}
    alike = dict.fromkeys(distance, 0.95)
    load = {0: 1.0, 1: 5.0, 2: 3.0, 3: 1.0, 4: 1.0}
    limits = {"max_distance": 0.3, "min_similarity": 0.8}
    plans = plan_merges(roster, distance, alike, load, min_experts=2, **limits)
    assert [(plan.uid, plan.into, plan.share) for plan in plans] == [(0, 2, 0.75)]
    assert plan_merges(roster, distance, alike, load, min_experts=5, **limits) == []
    unlike = dict.fromkeys(distance, 0.1)
    assert plan_merges(roster, distance, unlike, load, min_experts=2, **limits) == []


def test_plan_prunes_takes_the_lowest_load_first_and_skips_young_experts():
    roster = ExpertRoster.initial(5, 6).grow(5, step=90)
    load = {0: 100.0, 1: 1.0, 2: 0.0, 3: 2.0, 4: 100.0, 5: 0.0}
    limits = {"step": 100, "below": 0.1, "min_age": 20}
    assert [plan.uid for plan in plan_prunes(roster, load, min_experts=2, **limits)] == [2, 1, 3]
    assert [plan.uid for plan in plan_prunes(roster, load, min_experts=2, excluded=[1], **limits)] == [2, 3]
    assert [plan.uid for plan in plan_prunes(roster, load, min_experts=5, **limits)] == [2]
    assert plan_prunes(roster, dict.fromkeys(range(6), 0.0), min_experts=2, **limits) == []


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.sampled_from([1, 2, 4]))
def test_plan_placement_balances_active_experts_with_the_fewest_moves(seed, ranks):
    draws = random.Random(seed)
    roster, placement = random_history(draws, 8, 30)[-1], initial_placement(8, ranks, "round_robin")
    used = {record.logical_id for record in roster.active}

    def active(places):
        return [len(used & set(row)) for row in places.slots]

    together = np.array([[draws.random() for _ in range(8)] for _ in range(8)])
    after = plan_placement(roster, placement, together + together.T)
    assert max(active(after)) - min(active(after)) <= 1
    assert sorted(logical_id for row in after.slots for logical_id in row) == list(range(8))
    moved = sum(
        logical_id in used and after.owner(logical_id).rank != placement.owner(logical_id).rank
        for logical_id in range(8)
    )
    surplus = sum(max(0, count - -(-len(roster) // ranks)) for count in active(placement))
    lack = sum(max(0, len(roster) // ranks - count) for count in active(placement))
    assert moved == max(surplus, lack)


def test_plan_placement_moves_the_expert_with_the_least_affinity():
    at = (0, 2, 4, 1, 6)  # four on rank 0, one on rank 1
    roster = ExpertRoster(8, tuple(ExpertRecord(uid, logical_id) for uid, logical_id in enumerate(at)))
    together = np.zeros((8, 8))
    for a, b, tokens in [(0, 2, 9), (2, 4, 9), (6, 1, 5)]:
        together[a, b] = together[b, a] = tokens
    after = plan_placement(roster, ROUND_ROBIN, together)
    assert after.owner(6).rank == 1
    assert [after.owner(logical_id).rank for logical_id in (0, 2, 4, 1)] == [0, 0, 0, 1]


def test_plan_sleep_with_more_than_twice_the_initial_experts_shortens_the_interval():
    def steps(active: int, least: int | None = 500) -> int:
        return plan_sleep(active, 4, every=1000, least=least)

    assert [steps(active) for active in (2, 4, 6, 8, 9, 12, 40)] == [1000, 1000, 1000, 1000, 889, 667, 500]
    assert steps(40, least=None) == 1000
    assert plan_sleep(4, 4, every=150, least=500) == 150
