"""Runs of recipes, and their records."""

import json
import random
from unittest import mock

import pytest

from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.preempted import preempted_at
from toolkit.run.tracking.jsonl import read_metrics


def metrics(run):
    """Return the log steps of a run folder without measured times."""
    lines = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]


def losses(run):
    return [line["train/loss"] for line in metrics(run) if "train/loss" in line]


def results(run):
    return json.loads((run / "results.json").read_text())


def assert_equal_curves(run, reference):
    """Assert that training and evaluation metrics are equal up to rounding in float64."""
    for found, expected in zip(metrics(run), metrics(reference), strict=True):
        for name, value in expected.items():
            if name.startswith(("step", "train/", "eval", "old")):
                tolerant = pytest.approx(value, rel=IN_FLOAT64) if isinstance(value, float) else value
                assert found[name] == tolerant, name


def main_in_float64(recipe, config):
    """Train a recipe in float64, with a model that transformers builds in float32."""
    build_model = recipe.build_model
    with in_float64(), mock.patch.object(recipe, "build_model", lambda *args: build_model(*args).double()):
        return recipe.main(config)


def train_with_stop(main, config, step):
    """Train until preempted after `step` steps, then resume."""
    with preempted_at(step):
        main(config)
    main(config)


def write_corpus(path, phrases=("to be", "or not", "that is", "the question")):
    """Write a small text of `phrases` in random order."""
    draws = random.Random(0)
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(" ".join(draws.choices(phrases, k=6)) for _ in range(500)))
