"""Validation of run settings, their conversion to JSON, and the --config file: precedence and errors."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import toolkit as tk
from recipes.mnist_moe import PRESETS, debug, full
from toolkit.data.identity import identity_of
from toolkit.errors import UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.run import cli
from toolkit.run.config.experts import MoERunConfig
from toolkit.run.config.optimizer_options import OptimizerOptions, ScheduleOptions
from toolkit.run.config.run import RunConfig, to_dict
from toolkit.run.config.settings import NOT_OF_THE_TRAJECTORY, decides_what_is_learned, differing_names
from toolkit.run.data import record_data
from toolkit.run.folder import DATA
from toolkit.run.tracking.jsonl import to_json

YAML = """
epochs: 3                # a comment
lr: 1e-3
mixed_precision: no
max-steps: null
cpu: true
max-experts: 12
replan:
  planner: swap
  guarded: false
  every: 20
optimizer:
  weight_decay: 0.5
lifecycle.merge-distance: 0.3
"""


def parse(path, text, *flags, presets=PRESETS):
    path.write_text(text)
    return cli.parse(presets, [next(iter(presets)), "--config", str(path), *flags])


def test_flags_override_config_file_and_config_file_overrides_preset(tmp_path):
    config = parse(tmp_path / "mine.yaml", YAML, "--epochs", "4")
    assert config == full().replace(
        epochs=4,
        lr=1e-3,
        mixed_precision="no",
        max_steps=None,
        cpu=True,
        max_experts=12,
        replan=ReplanOptions(planner="swap", guarded=False, every=20),
        optimizer=OptimizerOptions(weight_decay=0.5),
        lifecycle=full().lifecycle.replace(merge_distance=0.3),
    )
    assert cli.parse(PRESETS, ["--epochs", "4", f"--config={tmp_path / 'mine.yaml'}"]) == config


def test_values_of_config_file_and_flags_are_checked_together(tmp_path):
    with pytest.raises(UserError, match="batch_size=64: it must divide by 3"):
        parse(tmp_path / "mine.yaml", "num_processes: 3")
    assert parse(tmp_path / "mine.yaml", "num_processes: 3", "--batch-size", "66").batch_size == 66
    assert parse(tmp_path / "mine.yaml", "max_steps: none\ncheckpoint.best: none").checkpoint.best is None


def test_parse_config_file_that_is_a_pipe_raises(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UserError, match=r"pipe\.yaml: is not a regular file"):
        cli.parse(PRESETS, ["--config", str(tmp_path / "pipe.yaml")])


def test_config_json_of_run_is_a_config_file(tmp_path, monkeypatch):
    config = debug().replace(seed=3, lr=2.5e-3, max_experts=8, run_dir=tmp_path / "run", tracker="none", cpu=True)
    config = config.replace(run_name="first")
    monkeypatch.setenv("WANDB_PROJECT", "digits")
    with tk.start_run("mnist_moe", config) as run:
        record_data(run, test=identity_of(tk.TensorTable(label=torch.arange(4))))
        run.begin()
    text = (tmp_path / "run" / "config.json").read_text()
    assert set(json.loads(text)) == {"recipe", "data_identity", *to_dict(config)}
    path = tmp_path / "config.json"
    config = config.replace(project="digits")
    assert parse(path, text, "--run-dir", "other") == config.replace(run_dir="other")
    assert parse(path, json.dumps(json.loads(text), indent="\t")) == config


class RecipeConfig(RunConfig):
    sizes: tuple[int, ...] = (1, 2)
    note: str | None = "usual"
    maybe: bool | None = None


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
@pytest.mark.parametrize("changes", [{}, {"sizes": (), "maybe": False}, {"note": "no", "maybe": True, "max_steps": 3}])
def test_settings_read_from_config_of_run_are_equal(tmp_path, changes, name):
    config = RecipeConfig(**changes)
    assert parse(tmp_path / name, to_json(to_dict(config), indent=1), presets={"own": RecipeConfig}) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experst: 4", "experst: there is no such option. Did you mean experts?"),
        (
            "optimizer:\n  weight_decy: 4",
            "optimizer.weight_decy: there is no such option. Did you mean optimizer.weight_decay?",
        ),
        ("no-cpu: true", "no_cpu: there is no such option. Did you mean cpu?"),
        ("optimizer: 3", "optimizer: there is no such option."),
        ("lr: {a: 1}", "lr.a: there is no such option."),
        ("epochs: many", "epochs='many': input should be a valid integer"),
        ("epochs: 0", "epochs='0': input should be greater than 0"),
        ("optimizer.weight_decay: -1", "optimizer.weight_decay='-1': input should be greater than or equal to 0"),
        ("cpu: maybe", "cpu='maybe': input should be a valid boolean"),
        ("epochs: [[1], 2]", "epochs=[['1'], '2']: input should be a valid integer"),
        ("epochs 3", "has no flags. Write a line for each"),
        ("", "has no flags. Write a line for each"),
        ("lr: 1\nepochs: [3", "is neither YAML nor JSON"),
        ("a: &a [1]\nlr: *a", "aliases are not supported"),
        ("[" * 999 + "]" * 999, "maximum recursion depth exceeded"),
    ],
)
def test_invalid_config_file_raises_with_its_path(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        parse(tmp_path / "mine.yaml", text)
    assert str(error.value).startswith(f"--config {tmp_path / 'mine.yaml'}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


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
        (RunConfig, {"process_timeout": 1e300}, r"process_timeout=1e\+300: input should be less"),
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


def test_fields_that_may_change_on_resume_exist_and_do_not_decide_learning():
    assert {*MoERunConfig.model_fields, DATA} >= NOT_OF_THE_TRAJECTORY
    assert all(map(decides_what_is_learned, ("lr", "optimizer", "optimizer.weight_decay")))
    assert not any(map(decides_what_is_learned, ("run_dir", "checkpoint", "checkpoint.keep_last")))


def test_differing_names_ignores_settings_that_one_run_lacks():
    found = [{"lr": 0.1, "seed": 0, "betas": [1, 2]}, {"lr": 0.2, "seed": 0, "betas": [1, 2], "new": 3}]
    assert differing_names(found) == ["lr"]
    assert differing_names([{"flag": True}, {"flag": 1}]) == ["flag"], "JSON distinguishes true and 1"
