"""The recipe vae_robustness: it resumes, does the same on two processes, and takes only labels that it was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes import vae_robustness
from tests.recipes.digits_data import DIGITS
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from tests.support.preempted import preempted_at
from toolkit.errors import UserError
from toolkit.run.tracking.jsonl import read_metrics

STOP_AT = 17


def config(folder: Path, name: str, **changes: Any) -> vae_robustness.Config:
    usual = {"run_dir": folder / name, "tracker": "none", "cpu": True, "epochs": 1, "corruption_rate": 0.2}
    return vae_robustness.debug().replace(**(usual | changes))


def train(folder: Path, name: str) -> None:
    with in_float64():
        vae_robustness.main(config(folder, name, corruption="resampled"))
    if name != "one":
        return
    with in_float64(), preempted_at(STOP_AT):
        vae_robustness.main(config(folder, "stopped", corruption="resampled"))
    with in_float64():
        vae_robustness.main(config(folder, "stopped", corruption="resampled"))
    for objective in ("supervised", "pseudo_label"):
        vae_robustness.main(config(folder, objective, objective=objective, max_steps=6))
    vae_robustness.main(config(folder, "reference", objective="reference", labels=400, max_steps=6))
    vae_robustness.main(config(folder, "bf16", mixed_precision="bf16", gradient_accumulation_steps=2, max_steps=6))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of: "one" process, "two" of them, "stopped" and continued, and short ones of the other settings."""
    folder = tmp_path_factory.mktemp("vae")
    run_distributed(train, 1, folder, "one")
    run_distributed(train, 2, folder, "two")
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith("perf/")}
        for line in read_metrics(run / "metrics.jsonl")
    ]


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


def test_two_processes_draw_and_learn_what_one_does(runs):
    one, two = lines(runs / "one"), lines(runs / "two")
    assert [line["step"] for line in one] == [10, 20, 23]
    for first, second in zip(one, two, strict=True):
        assert first == pytest.approx(second, rel=IN_FLOAT64)
    for name in ("mig", "one_style_probe", "all_styles_probe"):
        assert results(runs / "one")[name] == pytest.approx(results(runs / "two")[name], abs=0.03)


def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(runs):
    assert lines(runs / "stopped") == lines(runs / "one")


def test_it_learns(runs):
    first, *_, last = lines(runs / "one")
    assert last["train/elbo"] > first["train/elbo"] + 20, "nats per image"
    assert last["train/cross_entropy"] < first["train/cross_entropy"] < 2.4
    assert last["eval/accuracy"] > 0.3
    assert last["eval/loss"] > 0, "nats per image, of which grey digits have some hundred"


def test_the_leakage_of_the_class_is_reported(runs):
    found = results(runs / "one")
    for name in ("mig", "style_information", "one_style_probe", "all_styles_probe"):
        assert 0 <= found[name] <= 1


@pytest.mark.parametrize("name", ["supervised", "pseudo_label", "reference", "bf16"])
def test_the_controls_and_other_settings_run(runs, name):
    assert results(runs / name)["steps"] == 6
    assert ("mig" in results(runs / name)) == (name in ("reference", "bf16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": 5}, "labels=5: take 10 to 1442"),
        ({"labels": 10_000}, "labels=10000: take 10 to"),
    ],
)
def test_labels_that_cannot_be_had_are_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        vae_robustness.main(config(tmp_path, "run", **changes))


@pytest.mark.parametrize(
    "field",
    [{"corruption_rate": 1.5}, {"supervision_weight": -1.0}, {"smoothness_radius": 0.0}, {"style_dim": 0}],
    ids=lambda field: next(iter(field)),
)
def test_settings_without_a_meaning_are_refused(field):
    (name,) = field
    with pytest.raises(UserError, match=f"^{name}="):
        vae_robustness.Config(**field)


@pytest.mark.parametrize("objective", ["exact", "supervised"])
def test_the_size_of_the_classifier_reaches_the_model(objective):
    small = vae_robustness.debug().replace(objective=objective, classifier_hidden_size=6)
    model, _ = vae_robustness.build(small, DIGITS)
    assert [layer.out_features for layer in model.classifier if hasattr(layer, "out_features")] == [6, 3, 10]
