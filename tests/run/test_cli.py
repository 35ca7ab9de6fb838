"""The command line: presets, flags, help, and how quickly it answers."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipes import few_labels, finetune_moe, har, lm_moe, lmu_speech, mnist_moe, psmnist, vae_robustness
from tests.support.helpers import run_recipe
from toolkit.data.images import HUB_REPOS, VALIDATION
from toolkit.errors import Preempted, UserError
from toolkit.run import cli
from toolkit.run.config.experts import DynamicRunConfig, ExpertRunConfig, MoERunConfig
from toolkit.run.config.flags import COMMON, flags_of, help_text
from toolkit.run.config.run import RunConfig, to_dict


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    widths: tuple[int, ...] = (8, 8)
    """Hidden units of each layer."""


def full() -> Config:
    """The published run."""
    return Config(epochs=5)


def tiny() -> Config:
    """A moment."""
    return replace(full(), epochs=1, lr=0.1)


RECIPES = [few_labels, finetune_moe, har, lm_moe, lmu_speech, mnist_moe, psmnist, vae_robustness]
PRESETS = {"full": full, "tiny": tiny}


def test_no_word_means_the_first_preset():
    assert cli.parse(PRESETS, []) == full()


def test_the_first_word_picks_a_preset_and_flags_change_it():
    assert cli.parse(PRESETS, ["tiny", "--epochs", "3"]) == replace(tiny(), epochs=3)


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
    assert cli.parse(PRESETS, typed.split()) == replace(full(), **changed)


def test_the_name_of_the_preset_is_kept_for_trackers_and_is_no_setting():
    assert [cli.parse(PRESETS, words).preset for words in ([], ["tiny", "--epochs", "3"])] == ["full", "tiny"]
    assert "preset" not in to_dict(cli.parse(PRESETS, ["tiny"]))


def test_groups_are_reached_by_a_dot():
    config = cli.parse(PRESETS, ["--optimizer.weight_decay", "0.5", "--schedule.name", "constant"])
    assert (config.optimizer.weight_decay, config.schedule.name) == (0.5, "constant")


def refusal(presets: dict[str, Callable[[], Any]], typed: str) -> str:
    with pytest.raises(UserError) as error:
        cli.parse(presets, typed.split())
    return str(error.value)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--widths a b", "--widths a b: take an integer, or several with spaces between."),
        ("--width 3", "unknown flag --width: did you mean --widths?"),
        ("--beta1 3", "unknown flag --beta1: did you mean --optimizer.beta1?"),
        ("tinny", "unknown preset 'tinny': did you mean tiny?"),
        ("large", "unknown preset 'large': take full or tiny."),
    ],
)
def test_a_refusal_is_a_sentence_with_the_remedy(typed: str, says: str):
    assert refusal(PRESETS, typed) == says


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclass(frozen=True, kw_only=True)
class Own(RunConfig):
    fancy: bool = False
    bare: int = 3
    either: int | str = 3
    number: int | float | None = None
    """A number."""
    maybe: bool | None = None
    """Perhaps."""
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    """Sizes."""
    extents: tuple[int, ...] | None = None
    """Extents."""
    colour: Colour = Colour.RED
    """Paint."""


OWN = {"own": Own}


def test_help_shows_fields_of_every_type_and_without_a_docstring():
    lines = [line.split(maxsplit=1) for line in help_text("recipe.py", "A recipe.", OWN, Own()).splitlines()]
    shown = {words[0]: " ".join(words[1:]) for words in lines if words}
    assert shown["--fancy"] == ""
    assert [" ".join(shown[name].split()) for name in ("--bare", "--either", "--number", "--maybe")] == [
        "INT [3]",
        "INT|TEXT [3]",
        "INT|FLOAT A number. [none]",
        "true|false Perhaps. [none]",
    ]
    assert " ".join(shown["--sizes"].split()) == "INT ... Sizes. [1 2]"
    assert " ".join(shown["--colour"].split()) == "NAME Paint. (RED, BLUE) [RED]"


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        ("--fancy --either abc --number 1.5", {"fancy": True, "either": "abc", "number": 1.5}),
        ("--sizes 3 4 5 --maybe true", {"sizes": [3, 4, 5], "maybe": True}),
        ("--maybe False --extents 1 2", {"maybe": False, "extents": (1, 2)}),
        (f"--bare {2**63 - 1} --number 1e30", {"bare": 2**63 - 1, "number": 1e30}),
        ("--maybe none --extents none --colour BLUE", {"colour": Colour.BLUE}),
    ],
)
def test_own_fields_of_every_type_are_read(typed: str, changed: dict[str, Any]):
    assert cli.parse(OWN, typed.split()) == replace(Own(), **changed)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--number abc", "--number abc: take an integer, a number or none."),
        ("--maybe 3", "--maybe 3: take true, false or none."),
        ("--colour PINK", "--colour PINK: take RED or BLUE."),
        ("--bare 99999999999999999999", f"--bare 99999999999999999999: take an integer of at most {2**63 - 1}."),
        ("--bare -9223372036854775809", f"--bare -9223372036854775809: take an integer of at most {2**63 - 1}."),
        ("--number 9223372036854775808", f"--number 9223372036854775808: take an integer of at most {2**63 - 1}."),
        ("--sizes 3 9223372036854775808", f"--sizes 9223372036854775808: take an integer of at most {2**63 - 1}."),
        ("--sizes a", "--sizes a: take an integer, or several with spaces between."),
        ("--sizes", "--sizes needs a value: take an integer, or several with spaces between."),
    ],
)
def test_a_value_of_another_type_is_refused(typed: str, says: str):
    assert refusal(OWN, typed) == says


def test_a_field_that_no_flag_can_set_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Table(RunConfig):
        weights: dict[str, int] = field(default_factory=dict)

    @dataclass(frozen=True, kw_only=True)
    class Required(RunConfig):
        width: int

    with pytest.raises(UserError, match=r"--weights: a field of type dict\[str, int\] cannot be a flag: use bool, int"):
        cli.parse({"table": Table}, ["--help"])
    with pytest.raises(UserError, match=r"the preset full leaves out a field that has no default .* 'width'"):
        cli.parse({"full": lambda: Required()}, [])
    assert cli.parse({"full": lambda: Required(width=3)}, ["--width", "4"]).width == 4


def test_help_has_presets_and_flags_and_does_not_load_torch():
    done = run_recipe("mnist_moe", "--help", env={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0
    for word in ("python recipes/mnist_moe.py", "debug", "Seconds", "--experts", "--optimizer.weight-decay"):
        assert word in done.stdout
    assert "toolkit.errors" in imported
    assert not {"torch", "accelerate", "transformers"} & imported


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_begins_with_presets_and_common_flags_on_one_screen(recipe: ModuleType):
    """24 lines of 100 columns, with a sentence for each flag below."""
    config = next(iter(recipe.PRESETS.values()))()
    text = help_text("recipe.py", recipe.__doc__, recipe.PRESETS, config)
    screen = text.splitlines()[:24]
    assert screen[0] == "usage: python recipe.py [PRESET] [--config FILE] [--flag value ...]"
    flags = {flag.name: flag for flag in flags_of(config)}
    common = [name for name in COMMON if name in flags]
    shown = [line.split()[0] for line in screen if line.startswith("  --")]
    assert len(common) >= 9
    assert shown[: len(common)] == common
    assert all(any(line.startswith(f"  {preset} ") for line in screen) for preset in recipe.PRESETS)
    described = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert sorted(described) == sorted(
        flag.off_name if flag.is_switch and flag.default else name for name, flag in flags.items()
    )
    assert [name for name, flag in flags.items() if not flag.sentence] == []
    assert "Switch off: Do not" not in text


def test_help_has_the_defaults_of_the_first_preset():
    lines = help_text("recipe.py", "A recipe.", PRESETS, full()).splitlines()
    assert "  --epochs INT            Passes over the training data. [5]" in lines
    assert "  --widths INT ...        Hidden units of each layer. [8 8]" in lines
    assert lines[lines.index("  --widths INT ...        Hidden units of each layer. [8 8]") - 1] == "This recipe"


def test_help_has_a_heading_for_each_class_of_settings_which_says_more_in_its_docstring():
    lines = help_text("recipe.py", "A recipe.", mnist_moe.PRESETS, mnist_moe.full()).splitlines()
    for kind in (RunConfig, ExpertRunConfig, MoERunConfig, DynamicRunConfig):
        assert lines.count(kind.help_heading) == 1
        assert kind.help_heading not in (kind.__doc__ or "")
        assert "Raises UserError" in (kind.__doc__ or "")
    assert lines.count("Learning rate schedule") == 1


@pytest.mark.parametrize("recipe", [mnist_moe, few_labels, psmnist, vae_robustness])
def test_help_of_a_recipe_of_images_names_the_sets(recipe: ModuleType):
    flags = {flag.name: flag for flag in flags_of(next(iter(recipe.PRESETS.values()))())}
    for word in ("auto", "digits", *HUB_REPOS, VALIDATION):
        assert word in flags["--dataset"].sentence


@pytest.mark.usefixtures("restored_signals")
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


@pytest.mark.usefixtures("restored_signals")
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
