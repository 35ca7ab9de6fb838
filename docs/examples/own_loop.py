"""Handwritten digits with experts, in a loop by hand over `run.accelerator`: nothing is subclassed.

python docs/examples/own_loop.py --num-processes 2 --cpu
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import toolkit as tk
from toolkit import ExpertParallel, experts
from toolkit.data import ImageData


def full() -> tk.RunConfig:
    """Five epochs of the digits that come with scikit-learn."""
    return tk.RunConfig(epochs=5, lr=3e-3, dataset="digits")


def debug() -> tk.RunConfig:
    """Seconds: one epoch."""
    return full().replace(epochs=1)


def build_model(data: ImageData) -> nn.Module:
    """Pixels, eight experts of which each image visits two, and logits."""
    pixels = tk.Pixels(mean=data.mean, std=data.std)
    mixture = experts.make_moe(64, 32, 8, top_k=2)
    return nn.Sequential(pixels, tk.MLP(28 * 28, 64, 64), mixture, nn.Linear(64, data.num_classes))


def build_optimizer(config: tk.RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, the same rate throughout."""
    return torch.optim.AdamW(model.parameters(), lr=config.peak_lr)


def main(config: tk.RunConfig) -> dict[str, Any]:
    with tk.start_run("own_loop", config) as run:
        data = tk.load_images(config.dataset, config.data_dir, on_main=run.on_main_and_share)
        images, labels = data.train.columns["input"], data.train.columns["label"].long()
        model = build_model(data)
        model, optimizer = ExpertParallel(run.accelerator).prepare(model, build_optimizer(config, model))
        run.begin()
        step, loss = 0, torch.tensor(0.0)
        for epoch in range(config.epochs):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(config.seed + epoch))
            for batch in order.split(config.batch_size):
                mine = batch[run.rank :: run.world_size]
                logits = model(images[mine].to(run.device))
                summed = nn.functional.cross_entropy(logits, labels[mine].to(run.device), reduction="sum")
                run.accelerator.backward(summed * run.world_size / len(batch))  # ranks' gradients are averaged
                run.accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                loss, step = run.accelerator.reduce(summed.detach()) / len(batch), step + 1
                if step % config.log_every == 0:
                    run.log({"train/loss": loss.item()}, step)
        return run.finish({"train_loss": loss.item(), "steps": step})


PRESETS = {"full": full, "debug": debug}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
