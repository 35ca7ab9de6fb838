"""The command line of a recipe: presets, flags, help and exit codes."""

import sys

import pytest

from benchmarks.support.processes import run_recipe
from recipes import few_labels, finetune_moe, har, lm_moe, lmu_speech, mnist_moe, psmnist, vae_robustness
from toolkit.errors import Preempted, UserError
from toolkit.run import cli
from toolkit.run.config.flags import OF_GUIDES, flags_of
from toolkit.run.config.optimizer_options import OptimizerOptions
from toolkit.run.config.run import RunConfig, to_dict
from toolkit.run.launch import exits


class Config(RunConfig):
    widths: tuple[int, ...] = (8, 8)


def full() -> Config:
    return Config(epochs=5)


def tiny() -> Config:
    return full().replace(epochs=1, lr=0.1)


RECIPES = [few_labels, finetune_moe, har, lm_moe, lmu_speech, mnist_moe, psmnist, vae_robustness]
PRESETS = {"full": full, "tiny": tiny}


def test_words_of_guides_name_flags():
    known = {flag for recipe in RECIPES for flag in flags_of(type(next(iter(recipe.PRESETS.values()))()))}
    assert {f"--{flag}" for flag in OF_GUIDES.values()} <= known
    assert known.isdisjoint(f"--{word}" for word in OF_GUIDES)


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        ("--batch-size 32", {"batch_size": 32}),
        ("--max-steps none", {"max_steps": None}),
        ("--tracker none", {"tracker": "none"}),
        ("--resume", {"resume": "yes"}),
        ("--resume --epochs 2", {"resume": "yes", "epochs": 2}),
        ("--resume no", {"resume": "no"}),
        ("--widths 1 2 3 --epochs 1", {"widths": (1, 2, 3), "epochs": 1}),
        ("--optimizer.weight_decay=0.5", {"optimizer": OptimizerOptions(weight_decay=0.5)}),
    ],
)
def test_parse_flags_change_first_preset(typed, changed):
    assert cli.parse(PRESETS, typed.split()) == full().replace(**changed)


def test_parse_first_word_selects_preset():
    config = cli.parse(PRESETS, ["tiny", "--epochs", "3"])
    assert config == tiny().replace(epochs=3)
    assert [config.preset, cli.parse(PRESETS, []).preset] == ["tiny", "full"]
    assert "preset" not in to_dict(config)


@pytest.mark.parametrize(
    ("typed", "switch"),
    [
        ("--replan.every 10", "--replan.planner swap"),
        ("--replan.no-guarded", "--replan.planner swap"),
        ("--lifecycle.merge-distance 0.5", "--max-experts 12"),
    ],
)
def test_parse_option_of_a_group_that_is_off_raises_with_both_flags(typed, switch):
    words, off = typed.split(), switch.split()[0]
    with pytest.raises(UserError) as error:
        cli.parse(mnist_moe.PRESETS, words)
    assert str(error.value) == f"{words[0]}: no effect without {off}. Add {off} or leave {words[0]} out."
    cli.parse(mnist_moe.PRESETS, [*words, *switch.split()])


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--epochs many", "Error parsing --epochs: invalid literal for int() with base 10: 'many'"),
        ("--resume maybe", "Expected one of ('auto',"),
    ],
)
def test_parse_value_that_a_flag_cannot_take_prints_error_of_tyro_once(words, said, rank, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", rank)
    waited = []
    monkeypatch.setattr(exits.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as stop:
        cli.parse(mnist_moe.PRESETS, words.split())
    assert (stop.value.code, waited) == (2, [] if rank == "0" else [exits.GRACE_S])
    assert capsys.readouterr().err.count(said) == 1


def test_help_of_script_lists_presets_and_all_flags():
    done = run_recipe("mnist_moe", "--help", "all")
    assert done.returncode == 0
    for word in ("python recipes/mnist_moe.py", "debug", "Seconds", "--experts", "--optimizer.weight-decay"):
        assert word in done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_fits_on_a_screen(recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.parse(recipe.PRESETS, ["--help"], recipe.__doc__)
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 80
    for word in ("debug", "--run-dir", "--help all lists every flag, those of"):
        assert word in text


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (None, 0, ""),
        (UserError("no good."), 2, "error: no good.\n"),
        (UserError("two\n lines of s3://me:secret@bucket/\x1b[2J"), 2, "error: two lines of s3://bucket/\\x1b[2J\n"),
        (Preempted("stopped at step 3."), 75, "stopped at step 3.\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C.\n"),
        (RuntimeError("boom"), 1, None),
    ],
)
def test_run_recipe_exits_with_code_and_message(monkeypatch, capsys, outcome, code, message):
    def main(_):
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit) as stop:
        cli.run_recipe(main, PRESETS)
    err = capsys.readouterr().err
    assert stop.value.code == code
    if message is None:
        assert "Traceback" in err
        assert "RuntimeError: boom" in err
    else:
        assert err == message


def test_run_recipe_in_interactive_python_raises(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(UserError, match=r"Call main\(config\) in a notebook"):
        cli.run_recipe(print, {"debug": RunConfig})
