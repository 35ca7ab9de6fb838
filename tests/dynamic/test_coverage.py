"""The coverage alarm on noise, learning curves, shifts and plateaus."""

import random

import pytest

from toolkit.dynamic.coverage import CoverageAlarm

SAMPLES = 128


def readings(draws: random.Random, levels: list[float]) -> list[float]:
    return [sum(draws.random() < level for _ in range(SAMPLES)) / SAMPLES for level in levels]


def learning(checks: int, last: float = 0.03) -> list[float]:
    return [last + 0.8 * 0.8**check for check in range(checks)]


@pytest.mark.parametrize("seed", range(20))
def test_learning_curve_raises_no_alarm(seed):
    alarm = CoverageAlarm()
    assert not any(alarm.observe(u, SAMPLES) for u in readings(random.Random(seed), learning(200)))


@pytest.mark.parametrize("level", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_shift_raises_one_alarm_within_three_checks(level, seed):
    draws, alarm = random.Random(seed), CoverageAlarm()
    for uncovered in readings(draws, learning(60)):
        alarm.observe(uncovered, SAMPLES)
    after = [alarm.observe(u, SAMPLES) for u in readings(draws, [level] * 3 + learning(40))]
    assert "shift" in after[:3]
    assert sum(lack is not None for lack in after) == 1


def test_lasting_lack_of_coverage_raises_a_plateau_alarm():
    draws, alarm = random.Random(0), CoverageAlarm()
    reported = [alarm.observe(u, SAMPLES) for u in readings(draws, learning(120, last=0.25))]
    assert "plateau" in reported
    assert "shift" not in reported


def test_state_dict_continues_the_alarm():
    levels = readings(random.Random(3), learning(50) + [0.6] * 5)
    reference, first, second = CoverageAlarm(), CoverageAlarm(), CoverageAlarm()
    expected = [reference.observe(u, SAMPLES) for u in levels]
    reported = [first.observe(u, SAMPLES) for u in levels[:30]]
    second.load_state_dict(first.state_dict())
    assert reported + [second.observe(u, SAMPLES) for u in levels[30:]] == expected
