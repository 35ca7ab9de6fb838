"""A file of flags: it counts more than the preset and less than the command line, and what is wrong in it is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import toolkit as tk
from recipes.mnist_moe import PRESETS, debug, full
from toolkit.data.identity import identity_of
from toolkit.errors import UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.run import cli
from toolkit.run.config.optimizer_options import OptimizerOptions
from toolkit.run.config.run import RunConfig, to_dict
from toolkit.run.data import record_data
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


def parse(tmp_path: Path, text: str, *flags: str, name: str = "mine.yaml", preset: str = "full"):
    (tmp_path / name).write_text(text)
    return cli.parse(PRESETS, [preset, "--config", str(tmp_path / name), *flags])


def test_a_file_changes_the_preset_and_flags_change_the_file(tmp_path: Path):
    config = parse(tmp_path, YAML, "--epochs", "4")
    expected = full().replace(
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
    assert config == expected
    (tmp_path / "mine.yaml").write_text(YAML)
    assert cli.parse(PRESETS, ["--epochs", "4", f"--config={tmp_path / 'mine.yaml'}"]) == expected


def test_parse_config_file_that_is_a_pipe_raises(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UserError, match=r"pipe\.yaml: is not a regular file"):
        cli.parse(PRESETS, ["--config", str(tmp_path / "pipe.yaml")])


def test_the_config_of_a_run_is_such_a_file(tmp_path: Path):
    config = debug().replace(seed=3, lr=2.5e-3, max_experts=8, run_dir=tmp_path / "run", tracker="none", cpu=True)
    with tk.start_run("mnist_moe", config) as run:
        record_data(run, test=identity_of(tk.TensorTable(label=torch.arange(4))))
        run.begin()
    text = (tmp_path / "run" / "config.json").read_text()
    assert set(json.loads(text)) == {"recipe", "data_identity", *to_dict(config)}
    elsewhere = tmp_path / "another"
    again = parse(tmp_path, text, "--run-dir", str(elsewhere), name="config.json")
    assert again == config.replace(run_dir=elsewhere)
    assert parse(tmp_path, json.dumps(json.loads(text), indent="\t"), name="config.json") == config


class Own(RunConfig):
    sizes: tuple[int, ...] = (1, 2)
    note: str | None = "usual"
    maybe: bool | None = None


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
@pytest.mark.parametrize("config", [Own(), Own(sizes=(), maybe=False), Own(note="no", maybe=True, max_steps=3)])
def test_every_setting_reads_back_from_the_config_of_a_run(tmp_path: Path, config: Own, name: str):
    (tmp_path / name).write_text(to_json(to_dict(config), indent=1))
    assert cli.parse({"own": Own}, ["--config", str(tmp_path / name)]) == config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("experst: 4", "unknown flag --experst. Did you mean --experts?"),
        (
            "optimizer:\n  weight_decy: 4",
            "unknown flag --optimizer.weight-decy. Did you mean --optimizer.weight-decay?",
        ),
        ("epochs: many", "--epochs: invalid literal"),
        ("epochs: 0", "--epochs 0: input should be greater than 0"),
        ("cpu: 1", "--cpu 1: take true or false."),
        ("betas: [[1], 2]", "--betas: is a list or group within a list. Write its values in one list."),
        ("epochs 3", "has no flags. Write a line for each"),
        ("", "has no flags. Write a line for each"),
        ("lr: 1\nepochs: [3", "is neither YAML nor JSON"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_name(tmp_path: Path, text: str, says: str):
    with pytest.raises(UserError) as refusal:
        parse(tmp_path, text)
    assert str(refusal.value).startswith(f"--config {tmp_path / 'mine.yaml'}: ")
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
