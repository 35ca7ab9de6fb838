import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.dynamic.coverage import CumulativeSum


def noise(seed: int, count: int) -> list[float]:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()


@given(seed=st.integers(0, 2**31))
@settings(max_examples=25)
def test_a_series_that_rises_by_four_deviations_is_noticed_within_six_values(seed):
    detector = CumulativeSum()
    values = noise(seed, 60)
    before = [detector.add(value) for value in values[:40]]
    if not any(before):
        assert any(detector.add(value + 4) for value in values[40:46])


def test_false_alarms_are_rare():
    alarms = sum(map(CumulativeSum().add, noise(0, 20_000)))
    assert alarms <= 40, "one in five hundred values"


def test_a_loss_that_falls_raises_no_alarm():
    detector = CumulativeSum()
    assert not any(detector.add(math.exp(-step / 30) + 0.02 * x) for step, x in enumerate(noise(0, 200)))


def test_one_bad_value_raises_no_alarm():
    detector = CumulativeSum()
    values = noise(3, 60)
    values[30] = 1e6
    assert not any(map(detector.add, values))


def test_a_detector_goes_on_from_its_state():
    detector, other = CumulativeSum(), CumulativeSum()
    values = [*noise(1, 30), *(value + 3 for value in noise(2, 10))]
    for value in values[:30]:
        detector.add(value)
    other.load_state_dict(detector.state_dict())
    assert [detector.add(v) for v in values[30:]] == [other.add(v) for v in values[30:]]
    assert detector.state_dict() == other.state_dict()
