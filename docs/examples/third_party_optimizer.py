"""Handwritten digits with Lion, an optimizer of a package of its own (`pip install lion-pytorch`).

python docs/examples/third_party_optimizer.py --num-processes 2 --cpu
"""

from __future__ import annotations

from typing import Any

import torch
from lion_pytorch import Lion  # type: ignore[import-untyped]
from torch import nn

import toolkit as tk
from toolkit.data import ImageData


def full() -> tk.RunConfig:
    """Five epochs of the digits that come with scikit-learn."""
    return tk.RunConfig(epochs=5, lr=3e-4, dataset="digits")


def debug() -> tk.RunConfig:
    """Seconds: one epoch."""
    return full().replace(epochs=1, lr=1e-4)


def build_model(data: ImageData) -> nn.Module:
    """Pixels and a network of one hidden layer."""
    return nn.Sequential(tk.Pixels(mean=data.mean, std=data.std), tk.MLP(28 * 28, 64, data.num_classes))


def build_optimizer(config: tk.RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Lion, on the rates of the config's schedule."""
    return Lion(model.parameters(), lr=config.peak_lr, weight_decay=config.optimizer.weight_decay)


def main(config: tk.RunConfig) -> dict[str, Any]:
    with tk.start_run("third_party_optimizer", config) as run:
        data = tk.load_images(config.dataset, config.data_dir, on_main=run.on_main_and_share)
        model = build_model(data)
        optimizer = build_optimizer(config, model)
        return tk.fit(run, tk.Classification(), model, optimizer, data)


PRESETS = {"full": full, "debug": debug}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
