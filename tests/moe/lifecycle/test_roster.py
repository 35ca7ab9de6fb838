"""Populations: ids never return, seats are never shared, and what cannot happen is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.moe.lifecycle.roster import ExpertRoster


def a_history(draws: random.Random, logical_experts: int, events: int) -> list[ExpertRoster]:
    """A random history, one population after another."""
    rosters = [ExpertRoster.initial(draws.randint(1, logical_experts), logical_experts)]
    for step in range(1, events + 1):
        now = rosters[-1]
        ids = [record.id for record in now.active]
        choices = ["grow"] if now.vacant else []
        choices += ["merge", "prune"] if len(now) > 1 else []
        if not choices:
            break
        match draws.choice(choices):
            case "grow":
                now = now.grow(draws.choice(now.vacant), step=step, parent=draws.choice(ids))
            case "merge":
                ends, into = draws.sample(ids, 2)
                now = now.merge(ends, into=into, step=step)
            case _:
                now = now.prune(draws.choice(ids), step=step)
        rosters.append(now)
    return rosters


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), logical_experts=st.integers(1, 9))
def test_ids_never_return_and_seats_are_never_shared(seed: int, logical_experts: int) -> None:
    gone: set[int] = set()
    for before, after in zip(
        (lifecycle := a_history(random.Random(seed), logical_experts, 30)), lifecycle[1:], strict=False
    ):
        gone |= {record.id for record in before.records} - {record.id for record in before.active}
        assert not gone & {record.id for record in after.active}
        assert 1 <= len(after) <= logical_experts
        assert len(after.vacant) + len(after) == logical_experts
        assert abs(len(after) - len(before)) == 1
        assert all(after.logical_id_of(record.id) == record.logical_id for record in after.active)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_a_population_survives_json(seed: int) -> None:
    roster = a_history(random.Random(seed), 6, 20)[-1]
    assert ExpertRoster.from_dict(roster.to_dict()) == roster


def test_what_cannot_happen_is_refused() -> None:
    two = ExpertRoster.initial(2, 3)
    with pytest.raises(ValueError, match="seat 1 is not vacant"):
        two.grow(1, step=1)
    with pytest.raises(ValueError, match="expert 5 does not live"):
        two.merge(5, into=0, step=1)
    with pytest.raises(ValueError, match="merged into itself"):
        two.merge(0, into=0, step=1)
    one = two.prune(0, step=1)
    with pytest.raises(ValueError, match="expert 0 does not live"):
        one.prune(0, step=2)
    with pytest.raises(ValueError, match="is the last one"):
        one.prune(1, step=2)
    with pytest.raises(ValueError, match="two living experts on one seat"):
        ExpertRoster.initial(2, 3, sitting=(1, 1))
