"""Flags of other programs are answered with ours, which exist."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from recipes import har, lm_moe, lmu_speech, mnist_moe, vae_robustness
from recipes.mnist_moe import PRESETS
from tests.support.helpers import ROOT
from toolkit.errors import UserError
from toolkit.run import cli
from toolkit.run.config.flags import value_types
from toolkit.run.config.foreign_flags import REMEDIES, remedy

OURS = set(value_types(PRESETS["dynamic"]()))
OTHERS = {"--grid", "--num-seeds", "--seed-offset"}.union(
    *(value_types(next(iter(recipe.PRESETS.values()))()) for recipe in (har, lm_moe, lmu_speech, vae_robustness))
)
"""Of the other recipes, and of `toolkit sweep`."""
GUIDES = {"training": mnist_moe, "morph": mnist_moe, "har": har, "lmu": lmu_speech, "vae": vae_robustness}
"""A page of docs/start/migration -> the recipe that takes the place of its guide's script."""


def names_of_the_guide(page: str) -> set[str]:
    """The flags and settings in the first columns of a page: words that begin with dashes, or have an underscore."""
    text = (ROOT / "docs" / "start" / "migration" / f"{page}.md").read_text()
    spans = {
        span for line in re.findall(r"^\| ([^|]+)\|", text, re.MULTILINE) for span in re.findall(r"`([^`]+)`", line)
    }
    words = {word for span in spans if re.fullmatch(r"--[\w-]+|[a-z]+(_[a-z]+)+", word := span.split()[0])}
    return {f"--{word.lstrip('-').replace('_', '-')}" for word in words}


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--gpu-mode cpu", "unknown flag --gpu-mode: a GPU is used if there is one; --cpu stays"),
        ("--gpu_memory_fraction 0.9", "unknown flag --gpu-memory-fraction: use --memory-fraction"),
        ("--enable-sleep", "use --lifecycle.sleep or --lifecycle.no-sleep"),
        ("--no-pin-memory", "unknown flag --no-pin-memory: batches are pinned wherever there is a GPU"),
        ("--mixed-precision --epochs 1", "--mixed-precision needs a value: take no, fp16, bf16"),
        ("--num-workers -1", "--num-workers -1: take zero to 256"),
        ("--experts 16 --max-experts 8", "--max-experts 8: take --experts 16 or more"),
        ("--save-dir out", "unknown flag --save-dir: use --run-dir."),
        ("--no-amp", "unknown flag --no-amp: use --mixed-precision bf16, fp16 or no."),
        ("--rank 0", "unknown flag --rank: a launcher sets it in the environment"),
        ("--checkpoint-frequency 5", "unknown flag --checkpoint-frequency: use --checkpoint.every-steps."),
    ],
)
def test_a_flag_of_the_guide_is_answered_in_one_sentence(typed, says):
    with pytest.raises(UserError) as refusal:
        cli.parse(PRESETS, ["dynamic", *typed.split()])
    assert says in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


@pytest.mark.parametrize(("page", "recipe"), GUIDES.items())
def test_what_a_guide_has_gets_no_neighbour_that_only_looks_alike(page: str, recipe: ModuleType):
    flags = value_types(next(iter(recipe.PRESETS.values()))())
    unknown = names_of_the_guide(page) - set(flags)
    assert len(unknown) > 5
    wrong = []
    for flag in unknown:
        neighbour = re.fullmatch(r"did you mean --([\w.-]+)\?", cli.instead_of(flag, flags))
        name = flag.lstrip("-")
        if neighbour and not (neighbour[1].endswith(name) or neighbour[1].startswith(name)):
            wrong.append(f"{flag}: {neighbour[0]}")
    assert not wrong


def test_what_is_recommended_exists():
    recommended = {flag for text in REMEDIES.values() for flag in re.findall(r"--[a-z][\w.-]*", text)}
    assert recommended <= OURS | OTHERS
    assert not {f"--{name}" for name in REMEDIES} & OURS
    assert remedy("--no-such-thing", OURS) is None


def test_every_flag_that_is_answered_stands_on_a_page():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "start" / "migration").glob("*.md"))
    assert [name for name in REMEDIES if name not in pages and name.replace("-", "_") not in pages] == []
