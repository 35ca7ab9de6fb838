"""Schedules by hand-computed points."""

import math

import pytest

from toolkit.run.config.optimizer_options import ScheduleOptions
from toolkit.train.optim import build_schedule, constant, warmup_cosine, warmup_stable_decay


def test_constant_rises_in_equal_steps_and_stays_at_one():
    schedule = constant(warmup_steps=3)
    assert [schedule(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert constant()(0) == 1.0


def test_cosine_starts_at_one_after_the_warmup_and_is_halfway_down_in_the_middle():
    schedule = warmup_cosine(max_steps=12, warmup_steps=2)
    assert schedule(0) == pytest.approx(1 / 3)
    assert schedule(1) == pytest.approx(2 / 3)
    assert schedule(2) == pytest.approx(1.0)
    assert schedule(7) == pytest.approx(0.5)
    assert schedule(4) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.2)))
    assert schedule(12) == pytest.approx(0.0)
    assert schedule(50) == pytest.approx(0.0), "past the end it stays"


def test_stable_decay_has_a_plateau_and_falls_in_a_straight_line():
    schedule = warmup_stable_decay(max_steps=20, warmup_steps=1)
    assert [schedule(step) for step in (0, 1, 15, 16, 17, 18, 19, 20)] == [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]


def test_a_rate_does_not_depend_on_which_steps_were_asked_before():
    schedule = warmup_cosine(max_steps=10, warmup_steps=3)
    forwards = [schedule(step) for step in range(10)]
    assert [schedule(step) for step in reversed(range(10))] == forwards[::-1]


def test_the_config_names_the_schedule():
    cosine = build_schedule(ScheduleOptions(kind="cosine", warmup_steps=2), max_steps=20)
    assert cosine(11) == pytest.approx(0.5)
    assert build_schedule(ScheduleOptions(kind="constant"), max_steps=20)(19) == 1.0
    decay = build_schedule(ScheduleOptions(kind="stable_decay"), max_steps=20)
    assert [decay(15), decay(16), decay(18)] == pytest.approx([1.0, 1.0, 0.5])


def test_a_warmup_in_epochs_is_as_long_as_that_many_steps():
    by_epochs = build_schedule(ScheduleOptions(warmup_epochs=0.5), max_steps=20, steps_per_epoch=8)
    by_steps = build_schedule(ScheduleOptions(warmup_steps=4), max_steps=20, steps_per_epoch=8)
    assert [by_epochs(step) for step in range(20)] == [by_steps(step) for step in range(20)]
    assert [by_epochs(0), by_epochs(4)] == [0.2, 1.0]
