"""Short run of a small network on a linear rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import toolkit as tk
from tests.support.trainers import standard_trainer


class FakeLoad(tk.Callback):
    """Recorder of a constant load of four experts."""

    def on_step_end(self, trainer: tk.Trainer) -> None:
        trainer.record("moe/load/block", [0.4, 0.3, 0.2, 0.1])


def train(config: tk.RunConfig, *callbacks: tk.Callback, epochs: int = 2, **facts: Any) -> dict[str, Any]:
    with tk.start_run("toy", config.replace(epochs=epochs)) as run:
        inputs = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
        table = tk.TensorTable(input=inputs, label=(inputs[:, 0] > 0).long())
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        run.describe(dataset="rule", dataset_notice="made up", **facts)
        callbacks = (*callbacks, FakeLoad())
        trainer = standard_trainer(run, tk.Classification(), model, train=table, test=table, callbacks=callbacks)
        return run.finish(trainer.fit())
