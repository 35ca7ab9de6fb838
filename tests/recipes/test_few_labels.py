"""The recipe few_labels: two processes learn what one does, it continues exactly, and its controls run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from recipes import few_labels
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.run.tracking.jsonl import read_metrics


def config(folder: Path, name: str, **changes: Any) -> few_labels.Config:
    constant = tk.ScheduleOptions(kind="constant")
    usual = {"run_dir": folder / name, "tracker": "none", "cpu": True, "schedule": constant}
    # Few steps: an answer counts as confident soon, and counts little.
    quick = {"confidence": 0.11, "lr": 5e-3, "pseudo_label_weight": 0.1, "entropy_weight": 0.1}
    return few_labels.debug().replace(**(usual | quick | changes))


def train(folder: Path, name: str) -> None:
    with in_float64():
        few_labels.main(config(folder, f"{name}-both"))
        few_labels.main(config(folder, f"{name}-vat", method="vat", max_steps=10))
        if name == "one":
            few_labels.main(config(folder, "continued", max_steps=10))
            few_labels.main(config(folder, "continued", extend=True))
    if name == "one":
        few_labels.main(config(folder, "supervised", method="supervised", max_steps=4, mixed_precision="bf16"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few_labels")
    run_distributed(train, 1, folder, "one")
    run_distributed(train, 2, folder, "two")
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name.startswith(("step", "train/"))}
        for line in read_metrics(run / "metrics.jsonl")
    ]


@pytest.mark.parametrize("method", ["both", "vat"])
def test_two_processes_draw_and_learn_what_one_does(runs, method):
    one, two = lines(runs / f"one-{method}"), lines(runs / f"two-{method}")
    assert [line["step"] for line in one] == ([10, 20, 23] if method == "both" else [10])
    for first, second in zip(one, two, strict=True):
        assert first == pytest.approx(second, rel=IN_FLOAT64)
    if method == "both":
        assert one[-1]["train/confident"] > 0
        assert one[-1]["train/cross_entropy"] < one[0]["train/cross_entropy"]


def test_a_run_that_continues_sees_the_views_that_it_would_have_seen(runs):
    assert lines(runs / "continued") == lines(runs / "one-both")


def test_the_supervised_control_runs_in_bfloat16(runs):
    assert json.loads((runs / "supervised" / "results.json").read_text())["steps"] == 4


@pytest.mark.parametrize("field", [{"confidence": 0.0}, {"weight_average": 1.0}, {"blank": -1}, {"width": 0}])
def test_settings_without_a_meaning_are_refused(field):
    (name,) = field
    with pytest.raises(UserError, match=f"^{name}="):
        few_labels.Config(**field)
