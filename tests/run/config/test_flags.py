"""Flags of other programs are answered with ours, which exist."""

from __future__ import annotations

import re

import pytest

from recipes.mnist_moe import PRESETS
from toolkit.errors import UserError
from toolkit.run import cli
from toolkit.run.config.flags import REMEDIES, flags_of, instead_of

OURS = flags_of(type(PRESETS["dynamic"]()))


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--gpu-mode cpu", "unknown flag --gpu-mode: a GPU is used if there is one; --cpu stays"),
        ("--gpu_mode cpu", "unknown flag --gpu-mode: a GPU is used if there is one; --cpu stays"),
        ("--no-pin-memory", "unknown flag --no-pin-memory: batches are pinned wherever there is a GPU"),
        ("--save-dir out", "unknown flag --save-dir: use --run-dir."),
        ("--rank 0", "unknown flag --rank: a launcher sets it in the environment"),
    ],
)
def test_a_flag_of_another_program_is_answered_in_one_sentence(typed: str, says: str):
    with pytest.raises(UserError) as refusal:
        cli.parse(PRESETS, ["dynamic", *typed.split()])
    assert says in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_what_is_recommended_exists():
    recommended = {flag for text in REMEDIES.values() for flag in re.findall(r"--[a-z][\w.-]*", text)}
    assert recommended <= OURS.keys()
    assert not {f"--{name}" for name in REMEDIES} & OURS.keys()
    assert instead_of("--no-such-thing", OURS) == "see --help all."
