"""Validation of run settings, and their conversion to JSON."""

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from toolkit.errors import UserError
from toolkit.run.config.experts import MoERunConfig
from toolkit.run.config.optimizer_options import ScheduleOptions
from toolkit.run.config.run import RunConfig, to_dict
from toolkit.run.config.settings import NOT_OF_THE_TRAJECTORY, decides_what_is_learned, differing_names
from toolkit.run.folder import DATA

MICRO_BATCHES = {"num_processes": 3, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (RunConfig, {"batch_size": 13, **MICRO_BATCHES}, r"divide by 3 process.* times 2 accumulation .*use 12"),
        (
            RunConfig,
            {"batch_size": 128, "scale_lr": 32},
            "scale_lr=32: a learning rate raised to 0.004 needs a warm-up",
        ),
        (RunConfig, {"scale_lr": 0}, "scale_lr=0: input should be greater"),
        (RunConfig().replace, {"epochs": 0}, "^epochs=0: input should be greater than 0"),
        (RunConfig().replace, {"epoch": 3}, "^epoch=3: there is no such option"),
        (ScheduleOptions, {"warmup_epochs": 1.0, "warmup_steps": 5}, "warmup_epochs="),
        (ScheduleOptions, {"warmup_epochs": -1.0}, "warmup_epochs="),
        (ScheduleOptions, {"warmup_epochs": math.nan}, "warmup_epochs="),
    ],
)
def test_invalid_settings_raise(make, settings, message):
    with pytest.raises(UserError, match=message):
        make(**settings)


def test_peak_lr_with_scale_lr_is_proportional_to_batch_size():
    warm = ScheduleOptions(warmup_epochs=2)
    assert RunConfig(lr=1e-3, batch_size=128, scale_lr=32, schedule=warm).peak_lr == pytest.approx(4e-3)
    assert RunConfig(lr=1e-3, batch_size=128).peak_lr == 1e-3
    assert RunConfig(lr=1e-3, batch_size=16, scale_lr=32).peak_lr == 5e-4


@pytest.mark.parametrize(("world", "experts", "ep_size"), [(1, 8, 1), (2, 8, 2), (4, 6, 2), (3, 8, 1), (8, 4, 4)])
def test_default_ep_size_divides_world_size_and_experts(world, experts, ep_size):
    assert MoERunConfig(experts=experts).ep_size_in(world) == ep_size
    assert MoERunConfig(experts=experts, ep_size=1).ep_size_in(world) == 1


def test_config_is_frozen_and_becomes_json():
    config = RunConfig(run_dir=Path("runs/a"), batch_size=12, **MICRO_BATCHES).replace(epochs=3)
    assert (config.batch_size, config.epochs) == (12, 3)
    assert json.loads(json.dumps(to_dict(config)))["run_dir"] == "runs/a"
    with pytest.raises(ValidationError, match="frozen"):
        config.lr = 2.0


def test_user_error_of_config_has_field_value_and_remedy():
    with pytest.raises(UserError) as raised:
        MoERunConfig(replan={"planner": "swapp"})
    error = raised.value
    assert (error.field, error.value) == ("replan.planner", "swapp")
    assert str(error) == f"replan.planner='swapp': {error.remedy}."


def test_fields_that_may_change_on_resume_exist():
    assert {*MoERunConfig.model_fields, DATA} >= NOT_OF_THE_TRAJECTORY


def test_differing_names_ignores_settings_that_one_run_lacks():
    found = [{"lr": 0.1, "seed": 0, "betas": [1, 2]}, {"lr": 0.2, "seed": 0, "betas": [1, 2], "new": 3}]
    assert differing_names(found) == ["lr"]
    assert differing_names([{"flag": True}, {"flag": 1}]) == ["flag"], "JSON distinguishes true and 1"


def test_folders_and_checkpoints_do_not_decide_learning():
    assert all(map(decides_what_is_learned, ("lr", "optimizer", "optimizer.weight_decay")))
    assert not any(map(decides_what_is_learned, ("run_dir", "checkpoint", "checkpoint.keep_last")))
