"""Permuted sequential MNIST: 784 pixels one after another, in a fixed random order, with a Legendre memory.

python recipes/psmnist.py                 the parallel unit, 166,092 parameters
python recipes/psmnist.py cell            the nonlinear unit, 102,027 parameters, step by step: an hour on a CPU
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

import toolkit as tk

if TYPE_CHECKING:
    import torch
    from torch import nn


class Config(tk.RunConfig):
    """The settings of a run; fields shared with other recipes are inherited."""

    dataset: str = "auto"
    """auto, mnist, fashion_mnist, digits, a folder of images, or owner/name of the Hub; :validation behind any."""
    unit: Literal["parallel", "cell"] = "parallel"
    """parallel: all steps at once; cell: the nonlinear unit, whose steps need each other."""
    order: PositiveInt = 468
    """Coefficients that the memory keeps of the last 784 pixels."""
    hidden_size: PositiveInt = 346
    """Hidden units that read the memory."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the hidden units that is dropped in training; drawn on each process by itself."""
    blank_pixels: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the pixels of each training image that is hidden, other ones each time."""
    permutation: int = 0
    """Seed of the order of the pixels; the same for all seeds of training."""


def parallel() -> Config:
    """The feed-forward network of Chilkuri and Eliasmith 2021, table 2: order 468, 346 hidden units."""
    return Config(epochs=60, batch_size=100, lr=2e-3, dropout=0.2, blank_pixels=0.2, log_every=200)


def cell() -> Config:
    """The recurrent network of Voelker et al. 2019, section 3.3: order 256, 212 hidden units."""
    return Config(unit="cell", order=256, hidden_size=212, epochs=10, batch_size=100, lr=1e-3, log_every=50)


def debug() -> Config:
    """Seconds: the embedded digits, a small memory."""
    small = parallel().replace(order=128, hidden_size=64, dropout=0.0, blank_pixels=0.1)
    return small.replace(dataset="digits", epochs=3, batch_size=32, lr=5e-3, log_every=10)


def build_model(config: Config, data: tk.data.ImageData) -> nn.Module:
    import torch

    from speech.lmu import LMU, ParallelLMU, SequenceClassifier

    hidden = config.hidden_size
    make_unit: Any = ParallelLMU
    if config.unit == "cell":
        make_unit = partial(LMU, remembers_input=True)
    return SequenceClassifier(
        tk.Pixels(mean=0.0, std=1.0, blank=config.blank_pixels),
        make_unit(1, hidden, config.order, theta=data.num_pixels),
        order=torch.randperm(data.num_pixels, generator=tk.generator(config.permutation, "order of pixels")),
        hidden_size=hidden,
        num_classes=data.num_classes,
        dropout=config.dropout,
    )


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return `--optimizer.kind`, or any other optimizer of the model's parameters."""
    return tk.build_optimizer(model, config)


def main(config: Config) -> dict[str, Any]:
    with tk.start_run("psmnist", config) as run:
        share = run.on_main_and_share
        data = tk.load_images(config.dataset, config.data_dir, validation=config.validates, on_main=share)
        model = build_model(config, data)
        optimizer = build_optimizer(config, model)
        run.describe(parameters=sum(p.numel() for p in model.parameters()))
        augment = None
        if config.blank_pixels:
            augment = tk.BlankPixels(config.blank_pixels, shape=data.shape, grey=0, seed=config.seed)
        return tk.fit(run, tk.Classification(), model, optimizer, data, augment=augment)


PRESETS = {"parallel": parallel, "cell": cell, "debug": debug}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
