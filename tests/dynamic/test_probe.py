"""Losses before and after a change, and the coverage alarm on noise, shifts and plateaus."""

import math
import random

import pytest
import torch
from torch import Tensor

from toolkit.dynamic.coverage import CoverageAlarm
from toolkit.dynamic.probe import Probe


def probe(losses: Tensor) -> Probe:
    return Probe(losses, (), len(losses), float(losses.mean()), 0.0)


def losses(mean: float, spread: float, samples: int = 512) -> Tensor:
    """Return losses of which half are `spread` below the mean and half above."""
    return mean + spread * torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(samples // 2)


BEFORE = probe(losses(1.0, 0.0))


@pytest.mark.parametrize(
    ("after", "worse"),
    [
        (losses(0.9, 0.0), False),
        (losses(1.09, 0.0), False),
        (losses(1.11, 0.0), True),
        (losses(1.2, 2.3), False),  # a rise of 0.2 with a standard error of 0.1017
        (losses(1.21, 2.3), True),
        (losses(1.6, 20.0), False),  # a rise of 0.6 with a standard error of 0.88
        (losses(1.7, 20.0), True),  # more than ln 2
        (torch.cat([losses(1.0, 0.0, 510), losses(5e5, 0.0, 2)]), True),  # 2 outliers in 512 samples
        (losses(math.nan, 0.0), True),
        (losses(math.inf, 0.0), True),
    ],
)
def test_is_worse_needs_a_rise_beyond_tolerance_and_standard_error(after, worse):
    assert probe(after).is_worse(BEFORE, 0.1) is worse


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
