"""A file of flags: it counts more than the preset and less than the command line, and what is wrong in it is named."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import toolkit as tk
from recipes.mnist_moe import PRESETS, debug, full
from toolkit.data.identity import identity
from toolkit.errors import UserError
from toolkit.run import cli
from toolkit.run.config.run import OptimizerConfig, RunConfig, to_dict
from toolkit.run.data import record_data
from toolkit.run.tracking.jsonl import to_json

YAML = """
epochs: 3                # a comment
lr: 1e-3
mixed_precision: no
max-steps: null
cpu: true
guard: false
optimizer:
  weight_decay: 0.5
lifecycle.no-merge: true
"""

LAUGHS = "a0: &a0 [1, 2]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
"""A few lines that stand for 9**11 words."""


def parse(tmp_path: Path, text: str, *flags: str, name: str = "mine.yaml", preset: str = "full"):
    (tmp_path / name).write_text(text)
    return cli.parse(PRESETS, [preset, "--config", str(tmp_path / name), *flags])


def test_a_file_changes_the_preset_and_flags_change_the_file(tmp_path: Path):
    config = parse(tmp_path, YAML, "--epochs", "4")
    expected = replace(
        full(),
        epochs=4,
        lr=1e-3,
        mixed_precision="no",
        max_steps=None,
        cpu=True,
        guard=False,
        optimizer=OptimizerConfig(weight_decay=0.5),
        lifecycle=replace(full().lifecycle, merge=False),
    )
    assert config == expected
    (tmp_path / "mine.yaml").write_text(YAML)
    assert cli.parse(PRESETS, ["--epochs", "4", f"--config={tmp_path / 'mine.yaml'}"]) == expected


def test_the_config_of_a_run_is_such_a_file(tmp_path: Path):
    config = replace(debug(), seed=3, lr=2.5e-3, max_experts=8, run_dir=tmp_path / "run", tracker="none", cpu=True)
    with tk.start_run("mnist_moe", config) as run:
        record_data(run, test=identity(tk.TensorTable(label=torch.arange(4))))
    text = (tmp_path / "run" / "config.json").read_text()
    assert set(json.loads(text)) == {"recipe", "data_identity", *to_dict(config)}
    elsewhere = tmp_path / "another"
    again = parse(tmp_path, text, "--run-dir", str(elsewhere), name="config.json")
    assert again == replace(config, run_dir=elsewhere)
    assert parse(tmp_path, json.dumps(json.loads(text), indent="\t"), name="config.json") == config


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclass(frozen=True, kw_only=True)
class Own(RunConfig):
    sizes: tuple[int, ...] = (1, 2)
    widths: list[int] = field(default_factory=lambda: [3])
    note: str = "usual"
    maybe: bool | None = None
    clip: float = 1.0
    colour: Colour = Colour.RED


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
@pytest.mark.parametrize(
    "config",
    [
        Own(),
        Own(sizes=(), widths=[], note=""),
        Own(note="null", maybe=False, clip=math.inf, colour=Colour.BLUE),
        Own(note="no", maybe=True, clip=-math.inf, max_steps=3),
    ],
)
def test_every_setting_reads_back_from_the_config_of_a_run(tmp_path: Path, config: Own, name: str):
    (tmp_path / name).write_text(to_json(to_dict(config), indent=1))
    assert cli.parse({"own": Own}, ["--config", str(tmp_path / name)]) == config


def test_a_key_that_is_twice_in_json_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"mine.json: lr: is there twice: leave one out\.$"):
        parse(tmp_path, '{"lr": 1, "lr": 2}', name="mine.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("experst: 4", "unknown flag --experst: did you mean --experts?"),
        (
            "optimizer:\n  weight_decy: 4",
            "unknown flag --optimizer.weight-decy: did you mean --optimizer.weight-decay?",
        ),
        ("optimizer: adam", "unknown flag --optimizer: it is a group of flags"),
        ("epochs: many", "--epochs many: take an integer."),
        ("epochs: [1, 2]", "unexpected '2': --epochs takes one value."),
        ("cpu: 1", "--cpu 1: take true or false."),
        ("no-cpu: false", "--no-cpu false: take true."),
        ("config: other.yaml", "unknown flag --config: a file cannot name another one."),
        ("lr: 1\nlr: 2", "lr: is there twice: leave one out."),
        ("max_steps: 1\nmax-steps: 2", "max-steps: is there twice: leave one out."),
        ("optimizer: {beta1: 0.5, beta1: 0.6}", "beta1: is there twice: leave one out."),
        ("optimizer: {weight_decay: 0.1}\noptimizer.weight_decay: 0.2", "optimizer.weight-decay: is there twice"),
        ("widths: [[1], 2]", "--widths: a list or group within a list: write its values one after the other."),
        ("optimizer: &a {beta1: 0.5}\nschedule: *a", "line 1: a group that is named twice: write both out."),
        ("optimizer: &a {beta1: *a}", "line 1: a group that is named twice: write both out."),
        ("widths: &a [*a]", "line 1 is neither YAML nor JSON: correct it."),
        (LAUGHS, "a list or group within a list"),
        ("lr: " + "[" * 100_000, "is nested too deeply: write a line for each flag."),
        ('run_dir: "a\\0b"', r"--run-dir 'a\x00b': take a value without a null character."),
        ("batch_size: 99999999999999999999", "--batch-size 99999999999999999999: take an integer of at most"),
        ("[lr]: 3", "line 1 is neither YAML nor JSON: correct it."),
        ('run_dir: ""', "--run-dir needs a value"),
        ('dataset: "*** (1a2b)"', "--dataset *** (1a2b): was masked when this file was written"),
        ("epochs 3", "has no flags: write a line for each"),
        ("", "has no flags: write a line for each"),
        ("lr: 1\nepochs: [3", "line 2 is neither YAML nor JSON: correct it."),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_name(tmp_path: Path, text: str, says: str):
    with pytest.raises(UserError) as refusal:
        parse(tmp_path, text)
    assert str(refusal.value).startswith(f"--config {tmp_path / 'mine.yaml'}: ")
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_broken_json_is_named_by_its_line(tmp_path: Path):
    with pytest.raises(UserError, match="line 3 is neither YAML nor JSON"):
        parse(tmp_path, '{\n"epochs": 3,\n}', name="mine.json")


def test_json_that_is_nested_deeply_is_refused(tmp_path: Path):
    levels = 100_000
    with pytest.raises(UserError, match=r"mine.json: is nested too deeply: write a line for each flag\.$"):
        parse(tmp_path, '{"lr":' * levels + "1" + "}" * levels, name="mine.json")


@pytest.mark.parametrize(("name", "text"), [("mine.json", '{"lr": 0.5}'), ("mine.yaml", "lr: 0.5")])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, name: str, text: str):
    assert parse(tmp_path, "\ufeff" + text, name=name).lr == 0.5


def test_a_value_that_is_named_twice_is_read_twice(tmp_path: Path):
    config = parse(tmp_path, "lr: &rate 0.5\nlifecycle.replay_lr: *rate")
    assert (config.lr, config.lifecycle.replay_lr) == (0.5, 0.5)


def test_a_value_on_the_command_line_is_not_said_to_be_of_the_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"^--epochs many: take an integer\.$"):
        parse(tmp_path, "epochs: 3", "--epochs", "many")


def test_two_files_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="was given as well: take one file"):
        parse(tmp_path, "epochs: 3", "--config", "another.yaml")
