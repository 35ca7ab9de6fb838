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
    ],
)
def test_a_flag_without_effect_is_refused_and_taken_where_it_has_one(recipe, others, flag, needs):
    parse(recipe, others)  # what a preset sets is nobody's mistake
    with pytest.raises(UserError, match=f"{flag.split()[0]} has no effect with --[a-z]+ [a-z_]+: leave it out."):
        parse(recipe, f"{others} {flag}")
    parse(recipe, f"{others} {needs} {flag}")
