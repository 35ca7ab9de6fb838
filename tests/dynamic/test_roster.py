"""Invariants of rosters over random events."""

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.dynamic.roster import ExpertRoster


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
