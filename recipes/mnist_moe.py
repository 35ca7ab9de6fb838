"""An MoE model that classifies handwritten digits, with its experts sharded over all processes.

python recipes/mnist_moe.py                        one device, about a minute on a CPU
python recipes/mnist_moe.py --num-processes 4      four GPUs or processes; each owns some experts
accelerate launch recipes/mnist_moe.py             the same under Accelerate's launcher
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

import toolkit as tk

if TYPE_CHECKING:
    import torch
    from torch import nn


class Config(tk.dynamic.DynamicRunConfig):
    dataset: str = "auto"
    """auto, mnist, fashion_mnist, digits, a folder of images, or owner/name of the Hub; :validation behind any."""
    dim: PositiveInt = 384
    """Width of the stem and of what the experts read and write."""
    blank_pixels: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each training image's pixels that is hidden, drawn again at each visit."""
    shared_expert: bool = False
    """Add an expert that every image goes through."""


def full() -> Config:
    """The published run: five epochs of MNIST. Each image goes through a shared expert and one of eight others."""
    one_of_eight = top2().replace(shared_expert=True, top_k=1, router_normalize=False)
    return one_of_eight.replace(balance_weight=0.01, balance_within=900)  # the embedded digits are few steps


def top2() -> Config:
    """Two of eight experts for each image, none shared: one of them comes to be used for nearly all images."""
    return Config(epochs=5, lr=2e-3, blank_pixels=0.1)


def debug() -> Config:
    """Takes seconds: the embedded digits and a small MoE model."""
    return top2().replace(dataset="digits", epochs=2, experts=4, expert_hidden_size=32, dim=32, log_every=10)


def dense() -> Config:
    """The control: a dense network of equal active parameters, the same schedule."""
    return full().replace(experts=0)


def bias_balanced() -> Config:
    """Balance by a bias on the router's choice instead of a loss."""
    return full().replace(balance="bias")


def no_balance() -> Config:
    """No balancing: few experts get most of the load."""
    return full().replace(balance="none")


def dynamic() -> Config:
    """A split every 500 steps, pruned unless the loss needs it. Intervals are shorter in runs below 4,000 steps."""
    lifecycle = tk.dynamic.LifecycleOptions(
        grow_every=500,
        trial_gain=0.02,
        min_age=400,
        sleep_every=1000,
        min_sleep_every=None,
        replay_steps=0,
        within=4000,
    )
    return full().replace(experts=4, max_experts=16, lifecycle=lifecycle)


def build_model(config: Config, data: tk.data.ImageData, groups: tk.experts.ExpertGroups) -> nn.Module:
    """Build pixels, linear stem, residual block (MoE layer or its dense control) and linear head."""
    hidden = config.expert_hidden_size
    if config.experts == 0:
        block: nn.Module = tk.MLP(config.dim, 2 * hidden, config.dim)
    else:
        shared_expert = tk.MLP(config.dim, hidden, config.dim) if config.shared_expert else None
        block = tk.dynamic.moe_from_config(config, config.dim, groups=groups, shared_expert=shared_expert)
    pixels = tk.Pixels(mean=data.mean, std=data.std, blank=config.blank_pixels)
    return tk.ResidualClassifier(
        pixels, block, num_pixels=data.num_pixels, dim=config.dim, num_classes=data.num_classes
    )


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return `--optimizer.kind`, or any other optimizer of the model's parameters."""
    return tk.build_optimizer(model, config)


def main(config: Config) -> dict[str, Any]:
    with tk.start_run("mnist_moe", config) as run:
        share = run.on_main_and_share
        data = tk.load_images(config.dataset, config.data_dir, validation=config.validates, on_main=share)
        model = build_model(config, data, run.expert_groups)
        optimizer = build_optimizer(config, model)
        augment = None
        if config.blank_pixels:
            grey = round(255 * data.mean)
            augment = tk.BlankPixels(config.blank_pixels, shape=data.shape, grey=grey, seed=config.seed)
        task = tk.Classification()
        changes = tk.dynamic.lifecycle_callbacks(config, model, task, data.train, data.num_classes)
        return tk.fit(run, task, model, optimizer, data, augment=augment, callbacks=changes)


PRESETS = {preset.__name__: preset for preset in (full, top2, debug, dynamic, dense, bias_balanced, no_balance)}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
