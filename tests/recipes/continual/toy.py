"""Ten classes of images that a small network tells apart in a few steps, and a run over a stream of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import toolkit as tk
from continual.evaluation import TaskEvaluation
from continual.ewc import Consolidation, ElasticWeights
from continual.streams import TaskStream, rotated_stream, split_stream
from continual.training import stream_task, task_order
from tests.support.trainers import standard_trainer
from toolkit.data.batches import Augment
from toolkit.data.images import ImageData
from toolkit.data.replay_memory import ReplayMemory
from toolkit.data.table import Batch, TensorTable
from toolkit.dynamic.drift import DriftWatch
from toolkit.dynamic.remember import Remember, Replay


def images(count: int, seed: int) -> TensorTable:
    """Noise, and two bright rows that say the class; upside down, class c looks like class 9 - c."""
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randint(100, (count, 28, 28), generator=draws)
    labels = torch.arange(count) % 10
    for row in (4, 5):
        pixels[torch.arange(count), 2 * labels + row] += 100
    return TensorTable(input=pixels.to(torch.uint8), label=labels)


DATA = ImageData("rows", images(400, 0), images(100, 1), mean=0.2, std=0.15)


def toy_stream(kind: str = "class") -> TaskStream:
    """Five tasks of two classes each, in the scenario "class" or "task"; or "flipped", two tasks that contradict."""
    if kind == "flipped":
        return rotated_stream(DATA, seed=0, num_tasks=2, degrees_per_task=180.0)
    return split_stream(DATA, scenario="task" if kind == "task" else "class")


def dimmed(batch: Batch, visits: torch.Tensor) -> Batch:
    """An augmentation: each image is darker by up to a half, by as much as its visit says."""
    brightness = 1 - (visits * 2654435769 >> 7) % 1000 / 2000
    return {**batch, "input": (batch["input"] * brightness[:, None, None]).to(torch.uint8)}


def toy_config(folder: Path, **settings: Any) -> tk.RunConfig:
    settings = {"batch_size": 8, "lr": 3e-3, "log_every": 2} | settings
    return tk.RunConfig(run_dir=folder, tracker="none", cpu=True, schedule=CONSTANT, **settings)


CONSTANT = tk.ScheduleOptions(name="constant")


@contextmanager
def toy_trainer(
    config: tk.RunConfig,
    *callbacks: tk.Callback,
    kind: str = "class",
    strength: float | None = None,
    capacity: int | None = None,
    augment: Augment | None = None,
) -> Iterator[tk.Trainer]:
    with tk.start_run("toy", config) as run:
        stream = toy_stream(kind)
        pixels = tk.Pixels(mean=DATA.mean, std=DATA.std)
        model = nn.Sequential(pixels, tk.MLP(28 * 28, 32, stream.num_classes))
        penalty: ElasticWeights | None = None
        methods: list[tk.Callback] = [DriftWatch()]
        if strength is not None:
            penalty = ElasticWeights(model, strength)
            ends = task_order(run, stream).task_ends
            methods.append(Consolidation(penalty, stream, ends, samples=30))
        if capacity is not None:
            memory = ReplayMemory(stream.train, capacity, seed=config.seed)
            methods += [Replay(memory, 8), Remember(memory, every=3)]
        task = stream_task(stream, penalty=penalty)
        tasks = task_order(run, stream)
        yield standard_trainer(
            run,
            task,
            model,
            train=stream.train,
            order=tasks,
            augment=augment,
            max_steps=tasks.steps_per_epoch,
            evaluation=TaskEvaluation(stream.tests, tasks.task_ends, every_steps=config.eval_every_steps),
            callbacks=[*methods, *callbacks],
        )
