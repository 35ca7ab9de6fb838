"""The command line: presets, flags, help, and how quickly it answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipes import few_labels, finetune_moe, har, lm_moe, lmu_speech, mnist_moe, psmnist, vae_robustness
from tests.support.helpers import run_recipe
from toolkit.errors import Preempted, UserError
from toolkit.run import cli
from toolkit.run.config.flags import as_typed
from toolkit.run.config.run import RunConfig, to_dict


class Config(RunConfig):
    widths: tuple[int, ...] = (8, 8)
    """Hidden units of each layer."""


def full() -> Config:
    """The published run."""
    return Config(epochs=5)


def tiny() -> Config:
    """A moment."""
    return full().replace(epochs=1, lr=0.1)


RECIPES = [few_labels, finetune_moe, har, lm_moe, lmu_speech, mnist_moe, psmnist, vae_robustness]
PRESETS = {"full": full, "tiny": tiny}


def test_no_word_means_the_first_preset():
    assert cli.parse(PRESETS, []) == full()


def test_the_first_word_picks_a_preset_and_flags_change_it():
    assert cli.parse(PRESETS, ["tiny", "--epochs", "3"]) == tiny().replace(epochs=3)


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        ("--batch-size 32", {"batch_size": 32}),
        ("--batch_size 32", {"batch_size": 32}),
        ("--batch-size=32", {"batch_size": 32}),
        ("--lr 1e-4 --lr 2e-4", {"lr": 2e-4}),
        ("--cpu", {"cpu": True}),
        ("--no-cpu", {"cpu": False}),
        ("--max-steps none", {"max_steps": None}),
        ("--max-steps None", {"max_steps": None}),
        ("--tracker none", {"tracker": "none"}),
        ("--resume", {"resume": "yes"}),
        ("--resume --epochs 2", {"resume": "yes", "epochs": 2}),
        ("--resume no", {"resume": "no"}),
        ("--run-dir some/where", {"run_dir": Path("some/where")}),
        ("--widths 1 2 3 --epochs 1", {"widths": (1, 2, 3), "epochs": 1}),
    ],
)
def test_flags_are_read_as_people_write_them(typed: str, changed: dict[str, Any]):
    assert cli.parse(PRESETS, typed.split()) == full().replace(**changed)


def test_the_name_of_the_preset_is_kept_for_trackers_and_is_no_setting():
    assert [cli.parse(PRESETS, words).preset for words in ([], ["tiny", "--epochs", "3"])] == ["full", "tiny"]
    assert "preset" not in to_dict(cli.parse(PRESETS, ["tiny"]))


def test_groups_are_reached_by_a_dot():
    config = cli.parse(PRESETS, ["--optimizer.weight_decay", "0.5", "--schedule.kind", "constant"])
    assert (config.optimizer.weight_decay, config.schedule.kind) == (0.5, "constant")


def refusal(presets: dict[str, Callable[[], Any]], typed: str) -> str:
    with pytest.raises(UserError) as error:
        cli.parse(presets, typed.split())
    return str(error.value)


@pytest.mark.parametrize(
    ("typed", "switch"),
    [
        ("--replan.every 10", "--replan.planner swap"),
        ("--replan.no-guarded", "--replan.planner swap"),
        ("--lifecycle.merge-distance 0.5", "--max-experts 12"),
    ],
)
def test_parse_option_of_a_group_that_is_off_raises_with_both_flags(typed: str, switch: str):
    words = typed.split()
    off = switch.split()[0]
    said = f"{words[0]}: no effect without {off}. Add {off} or leave {words[0]} out."
    assert refusal(mnist_moe.PRESETS, typed) == said
    cli.parse(mnist_moe.PRESETS, [*words, *switch.split()])


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("ep_size=3: it does not divide.", "--ep-size 3: it does not divide."),
        ("planner='swapp': take another.", "--replan.planner swapp: take another."),
        ("compile=True: leave it out.", "--compile: leave it out."),
        ("cpu=False, balance='loss'.", "--no-cpu, --balance loss."),
        ("groups=...: leave one of the two out.", "groups=...: leave one of the two out."),
        ("max_steps=None: take 1 to epochs=3", "--max-steps none: take 1 to --epochs 3"),
    ],
)
def test_an_argument_that_is_a_setting_of_the_run_is_named_as_it_is_typed(said: str, typed: str):
    assert as_typed(said, mnist_moe.full()) == typed


def test_help_has_presets_and_flags():
    short = run_recipe("mnist_moe", "--help").stdout
    for word in ("debug", "--experts", "--run-dir", "--help all lists every flag, those of", "lifecycle"):
        assert word in short
    done = run_recipe("mnist_moe", "--help", "all")
    assert done.returncode == 0
    for word in ("python recipes/mnist_moe.py", "debug", "Seconds", "--experts", "--optimizer.weight-decay"):
        assert word in done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_does_not_load_torch(recipe: ModuleType):
    name = recipe.__name__.rpartition(".")[2]
    done = run_recipe(name, "--help", env={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "toolkit.errors" in imported
    assert not {"torch", "accelerate", "transformers"} & imported


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_is_a_screen(recipe: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.parse(recipe.PRESETS, ["--help"], recipe.__doc__)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (None, 0, ""),
        (UserError("no good."), 2, "error: no good.\n"),
        (UserError("two\n lines"), 2, "error: two lines\n"),
        (Preempted("stopped at step 3."), 75, "stopped at step 3.\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C.\n"),
    ],
)
def test_every_outcome_has_its_exit_code(
    outcome: BaseException | None,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def main(config: Config) -> None:  # noqa: ARG001
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    with pytest.raises(SystemExit) as left:
        cli.run_recipe(main, PRESETS)
    assert (left.value.code, capsys.readouterr().err) == (code, said)


def test_parse_preset_after_flags_raises():
    with pytest.raises(UserError, match="debug: comes after flags"):
        cli.parse(mnist_moe.PRESETS, ["--epochs", "1", "debug"])


def test_run_recipe_in_interactive_python_raises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(UserError, match=r"Call main\(config\) in a notebook"):
        cli.run_recipe(print, {"debug": RunConfig})


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def main(config: Config) -> None:  # noqa: ARG001
        raise RuntimeError("boom")

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit) as left:
        cli.run_recipe(main, PRESETS)
    err = capsys.readouterr().err
    assert left.value.code == 1
    assert "Traceback" in err
    assert "RuntimeError: boom" in err
