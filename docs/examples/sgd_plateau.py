"""Handwritten digits with plain SGD, whose rate is halved when the test loss no longer falls.

python docs/examples/sgd_plateau.py --num-processes 2 --cpu
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import toolkit as tk
from toolkit.data import ImageData


class Config(tk.RunConfig):
    momentum: float = 0.9
    """Momentum of SGD."""
    patience: int = 1
    """Evaluations without a lower loss before the rate is halved."""
    threshold: float = 1e-3
    """By how much of itself a loss has to fall."""


def full() -> Config:
    """Twelve epochs of the digits that come with scikit-learn."""
    return Config(epochs=12, lr=0.1, dataset="digits")


def debug() -> Config:
    """Seconds: four epochs, at a small rate."""
    return full().replace(epochs=4, lr=0.01, patience=0, threshold=0.5)


def build_model(data: ImageData) -> nn.Module:
    """Pixels and a network of one hidden layer."""
    return nn.Sequential(tk.Pixels(mean=data.mean, std=data.std), tk.MLP(28 * 28, 64, data.num_classes))


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=config.peak_lr, momentum=config.momentum)


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    """Halves the rate."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=config.patience, threshold=config.threshold)


def main(config: Config) -> dict[str, Any]:
    with tk.start_run("sgd_plateau", config) as run:
        data = tk.load_images(config.dataset, config.data_dir, on_main=run.on_main_and_share)
        model = build_model(data)
        optimizer = build_optimizer(config, model)
        scheduler = build_scheduler(config, optimizer)
        return tk.fit(run, tk.Classification(), model, optimizer, data, schedule=scheduler, schedule_metric="eval/loss")


PRESETS = {"full": full, "debug": debug}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
