"""Flags of other programs are answered with ours, which exist."""

from __future__ import annotations

import re

import pytest

from recipes import finetune_moe
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
        ("--local-rank 0", "unknown flag --local-rank: a launcher sets it in the environment"),
        ("--per_device_train_batch_size 8", "use --batch-size, which is over all processes."),
        ("--num-experts 4", "unknown flag --num-experts: use --experts."),
        ("--optim sgd", "unknown flag --optim: build_optimizer in the recipe makes it."),
        ("--load-best-model-at-end", "use --checkpoint.best validation/loss."),
    ],
)
def test_a_flag_of_another_program_is_answered_in_one_sentence(typed: str, says: str):
    with pytest.raises(UserError) as refusal:
        cli.parse(PRESETS, ["dynamic", *typed.split()])
    assert says in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_what_is_recommended_exists():
    recommended = {flag for text in REMEDIES.values() for flag in re.findall(r"--[a-z][\w.-]*", text)}
    assert recommended <= OURS.keys() | flags_of(type(finetune_moe.full())).keys()
    assert not {f"--{name}" for name in REMEDIES} & OURS.keys()
    assert instead_of("--no-such-thing", OURS) == "see --help all."
