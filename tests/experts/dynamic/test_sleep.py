"""When dynamic experts sleep."""

from __future__ import annotations

from toolkit.experts.dynamic.sleep import SleepSchedule


def test_sleep_phases_are_closer_with_more_than_twice_the_initial_experts():
    schedule = SleepSchedule(every=1000, min_every=500)
    assert [schedule.steps(active, 4) for active in (2, 4, 6, 8, 9, 12, 40)] == [1000, 1000, 1000, 1000, 889, 667, 500]
    assert SleepSchedule(every=1000, adaptive=False).steps(40, 4) == 1000
