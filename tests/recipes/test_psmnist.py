"""Permuted sequential MNIST: sizes, order of the pixels, and that it learns."""

from pathlib import Path

import pytest
import torch

import toolkit as tk
from recipes.psmnist import Config, build_model, cell, debug, main, parallel
from tests.recipes.digits_data import DIGITS
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from toolkit.run.tracking.jsonl import read_metrics


@pytest.mark.parametrize(("preset", "parameters"), [(parallel, 166_092), (cell, 102_027)])
def test_the_published_networks_have_their_sizes(preset, parameters):
    assert sum(p.numel() for p in build_model(preset(), DIGITS).parameters()) == parameters


@pytest.mark.parametrize("unit", ["parallel", "cell"])
def test_every_pixel_is_seen_once_in_an_order_that_the_seed_does_not_change(unit):
    torch.manual_seed(0)
    config = Config(unit=unit, order=8, hidden_size=6)
    model = build_model(config, DIGITS).eval()
    assert sorted(model.order.tolist()) == list(range(784))
    assert torch.equal(model.order, build_model(config.replace(seed=1), DIGITS).order)
    assert not torch.equal(model.order, build_model(config.replace(permutation=1), DIGITS).order)
    images = torch.zeros(2, 28, 28, dtype=torch.uint8)
    images[1].view(-1)[model.order[-1]] = 255
    logits = model(images)
    assert not torch.allclose(logits[0], logits[1])


def config(folder: Path, **settings) -> Config:
    return debug().replace(run_dir=folder, tracker="none", cpu=True, **settings)


def train_on_ranks(folder: Path) -> dict:
    with in_float64():
        return main(config(folder, epochs=1))


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]


def test_the_debug_preset_learns_and_two_processes_learn_the_same(tmp_path):
    (alone,) = run_distributed(train_on_ranks, 1, tmp_path / "one")
    assert alone["test_accuracy"] > 0.2  # four seeds: 0.29 to 0.59; chance is 0.1
    for results in run_distributed(train_on_ranks, 2, tmp_path / "two"):
        assert results["test_loss"] == pytest.approx(alone["test_loss"], rel=IN_FLOAT64)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=IN_FLOAT64)


def test_the_cell_trains(tmp_path):
    assert main(config(tmp_path / "run", unit="cell", order=8, hidden_size=8, max_steps=1))["steps"] == 1


def test_a_wrong_setting_is_named():
    with pytest.raises(tk.UserError, match="order=0: input should"):
        Config(order=0)
    with pytest.raises(tk.UserError, match=r"blank_pixels=1.0: input should be less than 1"):
        Config(blank_pixels=1.0)
