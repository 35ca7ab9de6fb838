"""A flag that has no effect beside the others is refused where it is typed, and nowhere else."""

from __future__ import annotations

import importlib

import pytest

from toolkit.errors import UserError
from toolkit.run import cli


def parse(recipe: str, line: str):
    return cli.parse(importlib.import_module(f"recipes.{recipe}").PRESETS, line.split())


@pytest.mark.parametrize(
    ("recipe", "others", "flag", "needs"),
    [
        ("few_labels", "vat", "--confidence 0.9", "--method fixmatch"),
        ("few_labels", "--method fixmatch", "--smoothness-radius 1", "--method vat"),
        ("few_labels", "supervised", "--weak-augment 0", "--method fixmatch"),
        ("vae_robustness", "reference", "--classifier-hidden-size 64", "--objective exact"),
        ("vae_robustness", "supervised", "--style-dim 4", "--objective exact"),
        ("vae_robustness", "reference", "--smoothness-weight 0", "--objective exact"),
        ("lmu_speech", "--target digits", "--beam-size 8", "--target characters"),
        ("lmu_speech", "guide", "--stride 2", "--encoder memory"),
        ("har", "--dataset uci_har", "--overlap 0.2", "--dataset hmp"),
        ("mnist_moe", "full", "--replan.every 10", "--replan.planner swap"),
        ("mnist_moe", "full", "--replan.no-guarded", "--replan.planner swap"),
        (
            "mnist_moe",
            "--replan.planner swap --replan.no-guarded",
            "--replan.expert-time-share 0.7",
            "--replan.guarded",
        ),
        ("mnist_moe", "full", "--lifecycle.merge-distance 0.5", "--max-experts 12"),
        ("mnist_moe", "full", "--lifecycle.no-merge", "--max-experts 12"),
        ("mnist_moe", "full", "--min-experts 3", "--max-experts 12"),
        ("mnist_moe", "dynamic --lifecycle.no-grow", "--lifecycle.grow-every 9", "--lifecycle.grow"),
        ("mnist_moe", "dynamic --lifecycle.no-sleep", "--lifecycle.trial-gain 0.1", "--lifecycle.sleep"),
        ("mnist_moe", "dynamic --lifecycle.no-prune", "--lifecycle.prune-below 0.1", "--lifecycle.prune"),
        ("mnist_moe", "dynamic --lifecycle.no-merge", "--lifecycle.merge-distance 0.1", "--lifecycle.merge"),
        ("mnist_moe", "--balance bias", "--balance-weight 0.1", "--balance loss"),
        ("mnist_moe", "bias_balanced", "--balance-scope local", "--balance loss"),
        ("mnist_moe", "full", "--drop-policy position", "--capacity-factor 2"),
        ("mnist_moe", "--tracker none", "--project digits", "--tracker wandb"),
        ("mnist_moe", "--tracker tensorboard", "--run-name first", "--tracker trackio"),
    ],
)
def test_a_flag_without_effect_is_refused_and_taken_where_it_has_one(recipe, others, flag, needs):
    parse(recipe, others)  # what a preset sets is nobody's mistake
    with pytest.raises(UserError, match=rf"{flag.split()[0]} has no effect with --[a-z.-]+( \w+)?: leave it out\."):
        parse(recipe, f"{others} {flag}")
    parse(recipe, f"{others} {needs} {flag}")
