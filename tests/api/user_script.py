"""A recipe and a training loop with `ExpertParallel` for mypy --strict in `test_public_names.py`; not executed."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional

import toolkit as tk
from toolkit.data.images import ImageData
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.parallel.groups import ExpertGroups


class Config(tk.MoERunConfig):
    width: int = 32

    def check_together(self) -> None:
        super().check_together()
        tk.require(self.width >= 1, "width", self.width, "take one or more")


def full() -> Config:
    schedule, optimizer = tk.ScheduleOptions(kind="cosine"), tk.OptimizerOptions(weight_decay=0.1)
    return Config(epochs=3, lr=1e-3, schedule=schedule, optimizer=optimizer)


def debug() -> Config:
    return full().replace(dataset="digits", max_steps=5)


class RecordAccuracy(tk.Callback):
    def __init__(self) -> None:
        self.accuracy = 0.0

    def on_evaluate_end(self, trainer: tk.Trainer, name: str, metrics: dict[str, float]) -> None:
        self.accuracy = metrics[f"{name}/accuracy"]
        trainer.record("eval/noted", self.accuracy)


class WeightedTask:
    def count(self, batch: tk.Batch) -> int:
        return len(batch["label"])

    def loss(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        total = functional.cross_entropy(model(batch["input"]), batch["label"], reduction="sum")
        return tk.Loss(total, self.count(batch))

    def evaluate(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        return self.loss(model, batch)


def build_model(config: Config, data: ImageData, groups: ExpertGroups) -> nn.Module:
    layer: MoE = tk.experts.make_moe(config.width, 2 * config.width, config.experts, config.top_k, groups=groups)
    placement: tk.experts.ExpertPlacement = layer.placement
    tk.require(placement.ranks == groups.ep_size, "experts", config.experts, "take a multiple of the ranks")
    pixels = tk.Pixels(mean=data.mean, std=data.std)
    return tk.ResidualClassifier(pixels, layer, num_pixels=28 * 28, dim=config.width, num_classes=data.num_classes)


def main(config: Config) -> dict[str, Any]:
    with tk.start_run("mine", config) as run:
        data = tk.load_images(config.dataset, config.data_dir, on_main=run.on_main_and_share)
        model = build_model(config, data, run.expert_groups)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        penalty = tk.experts.RouterPenalty(model, balance_weight=0.01)
        task: tk.Task = tk.Classification(penalty=penalty) if config.experts else WeightedTask()
        return tk.fit(run, task, model, optimizer, data, callbacks=[RecordAccuracy()])


def own_loop(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Train with experts sharded over ranks and rebalanced during the run."""
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    experts = tk.ExpertParallel(accelerator, replan=tk.experts.ReplanOptions(planner="swap", every=100))
    model, optimizer = experts.prepare(model, optimizer)
    last = 0.0
    for inputs, labels in batches:
        loss = functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
    return last


PRESETS = {"full": full, "debug": debug}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)
