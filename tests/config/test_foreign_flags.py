"""Flags of other programs are answered with ours, which exist."""

from __future__ import annotations

import re

import pytest

from recipes import vae_robustness
from recipes.mnist_moe import PRESETS
from tests.helpers import ROOT
from toolkit import cli
from toolkit.config.flags import value_types
from toolkit.config.foreign_flags import REMEDIES, remedy
from toolkit.errors import UserError

OURS = set(value_types(PRESETS["dynamic"]()))
OTHERS = set(value_types(vae_robustness.Config())) | {"--grid", "--num-seeds", "--seed-offset"}
"""Of the other recipe whose guide is answered, and of `toolkit sweep`."""


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--gpu-mode cpu", "unknown flag --gpu-mode: a GPU is used if there is one; --cpu stays"),
        ("--gpu_memory_fraction 0.9", "unknown flag --gpu-memory-fraction: use --memory-fraction"),
        ("--enable-sleep", "use --lifecycle.sleep or --lifecycle.no-sleep"),
        ("--no-pin-memory", "unknown flag --no-pin-memory: batches are pinned wherever there is a GPU"),
        ("--mixed-precision --epochs 1", "--mixed-precision needs a value: take no, fp16, bf16"),
        ("--num-workers -1", "--num-workers -1: take zero or more"),
        ("--experts 16 --max-experts 8", "--max-experts 8: take --experts 16 or more"),
    ],
)
def test_a_flag_of_the_guide_is_answered_in_one_sentence(typed, says):
    with pytest.raises(UserError) as refusal:
        cli.parse(PRESETS, ["dynamic", *typed.split()])
    assert says in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_what_is_recommended_exists():
    recommended = {flag for text in REMEDIES.values() for flag in re.findall(r"--[a-z][\w.-]*", text)}
    assert recommended <= OURS | OTHERS
    assert not {f"--{name}" for name in REMEDIES} & OURS
    assert remedy("--no-such-thing") is None


def test_every_flag_that_is_answered_stands_on_a_page():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "migration").glob("*.md"))
    assert [name for name in REMEDIES if name not in pages and name.replace("-", "_") not in pages] == []
