"""Populations: ids never return, seats are never shared, and what cannot happen is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.moe.lifecycle.roster import Population


def a_life(draws: random.Random, seats: int, events: int) -> list[Population]:
    """A random history, one population after another."""
    populations = [Population.initial(draws.randint(1, seats), seats)]
    for step in range(1, events + 1):
        now = populations[-1]
        ids = [member.id for member in now.living]
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
        populations.append(now)
    return populations


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), seats=st.integers(1, 9))
def test_ids_never_return_and_seats_are_never_shared(seed: int, seats: int) -> None:
    gone: set[int] = set()
    for before, after in zip((life := a_life(random.Random(seed), seats, 30)), life[1:], strict=False):
        gone |= {member.id for member in before.members} - {member.id for member in before.living}
        assert not gone & {member.id for member in after.living}
        assert 1 <= len(after) <= seats
        assert len(after.vacant) + len(after) == seats
        assert abs(len(after) - len(before)) == 1
        assert all(after.seat_of(member.id) == member.seat for member in after.living)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_a_population_survives_json(seed: int) -> None:
    population = a_life(random.Random(seed), 6, 20)[-1]
    assert Population.from_dict(population.to_dict()) == population


def test_what_cannot_happen_is_refused() -> None:
    two = Population.initial(2, 3)
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
        Population.initial(2, 3, sitting=(1, 1))
