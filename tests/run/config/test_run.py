"""Settings are checked when they are made, and become plain JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from toolkit.errors import UserError
from toolkit.run.config.experts import MoERunConfig
from toolkit.run.config.optimizer_options import ScheduleOptions
from toolkit.run.config.run import RunConfig, to_dict
from toolkit.run.config.settings import NOT_OF_THE_TRAJECTORY
from toolkit.run.folder import DATA


def test_a_batch_must_divide_and_the_message_says_into_what():
    RunConfig(batch_size=12, num_processes=3, gradient_accumulation_steps=2)
    with pytest.raises(UserError, match=r"divide by 3 process.* times 2 accumulation .*use 12"):
        RunConfig(batch_size=13, num_processes=3, gradient_accumulation_steps=2)


def test_a_scaled_rate_is_proportional_to_the_batch_and_warms_up():
    warm = ScheduleOptions(warmup_epochs=2)
    assert RunConfig(lr=1e-3, batch_size=128, scale_lr=32, schedule=warm).peak_lr == pytest.approx(4e-3)
    assert RunConfig(lr=1e-3, batch_size=128).peak_lr == 1e-3
    assert RunConfig(lr=1e-3, batch_size=16, scale_lr=32).peak_lr == 5e-4
    with pytest.raises(UserError, match=r"scale_lr=32: a learning rate raised to 0.004 needs a warm-up: add"):
        RunConfig(lr=1e-3, batch_size=128, scale_lr=32)
    with pytest.raises(UserError, match="scale_lr=0: input should be greater"):
        RunConfig(scale_lr=0)


def test_a_warmup_is_in_steps_or_in_epochs_and_finite():
    for settings in ({"warmup_epochs": 1.0, "warmup_steps": 5}, {"warmup_epochs": -1.0}, {"warmup_epochs": math.nan}):
        with pytest.raises(UserError, match="warmup_epochs="):
            ScheduleOptions(**settings)


@pytest.mark.parametrize(("world", "experts", "ep_size"), [(1, 8, 1), (2, 8, 2), (4, 6, 2), (3, 8, 1), (8, 4, 4)])
def test_experts_are_spread_over_as_many_processes_as_divide_both(world: int, experts: int, ep_size: int):
    assert MoERunConfig(experts=experts).ep_size_in(world) == ep_size
    assert MoERunConfig(experts=experts, ep_size=1).ep_size_in(world) == 1


def test_a_config_is_plain_json_and_frozen():
    config = RunConfig(run_dir=Path("runs/a"))
    assert json.loads(json.dumps(to_dict(config)))["run_dir"] == "runs/a"
    with pytest.raises(ValidationError, match="frozen"):
        config.lr = 2.0


def test_a_changed_copy_is_checked_as_a_new_config_is():
    config = RunConfig(lr=0.5).replace(epochs=3)
    assert (config.lr, config.epochs) == (0.5, 3)
    with pytest.raises(UserError, match=r"^epochs=0: input should be greater than 0"):
        config.replace(epochs=0)
    with pytest.raises(UserError, match=r"^epoch=3: there is no such option"):
        config.replace(epoch=3)


def test_an_error_has_field_value_and_remedy_as_data():
    with pytest.raises(UserError) as refused:
        MoERunConfig(replan={"planner": "swapp"})
    error = refused.value
    assert (error.field, error.value) == ("replan.planner", "swapp")
    assert str(error) == f"replan.planner='swapp': {error.remedy}."


def test_the_fields_that_may_change_between_a_run_and_its_continuation_exist():
    names = set(MoERunConfig.model_fields)
    assert names | {DATA} >= NOT_OF_THE_TRAJECTORY
