"""Short run of a small network on a linear rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.data.batches import EvalBatches, TrainBatches
from toolkit.data.table import TensorTable
from toolkit.run.config.run import RunConfig
from toolkit.run.run import start_run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.progress import Progress
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.pictures import draw_run
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer


class FakeLoad(Callback):
    """Recorder of a constant load of four experts."""

    def on_step_end(self, trainer: Trainer) -> None:
        trainer.record("moe/load/block", [0.4, 0.3, 0.2, 0.1])


def train(config: RunConfig, *callbacks: Callback, epochs: int = 2, **facts: Any) -> dict[str, Any]:
    with start_run("toy", config) as run:
        ranks: dict[str, Any] = {"rank": run.rank, "world_size": run.world_size, "device": run.device, "num_workers": 0}
        inputs = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
        table = TensorTable(input=inputs, label=(inputs[:, 0] > 0).long())
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        run.describe(dataset="rule", dataset_notice="made up", **facts)
        trainer = Trainer(
            run,
            Classification(),
            model,
            torch.optim.AdamW(model.parameters(), lr=config.lr),
            TrainBatches(table, batch_size=64, seed=config.seed, accumulation=1, **ranks),
            max_steps=epochs * 10,
            schedule=lambda step: 1.0,  # noqa: ARG005
            log_every=config.log_every,
            callbacks=[
                *callbacks,
                FakeLoad(),
                Throughput(),
                Evaluation(EvalBatches(table, batch_size=100, **ranks)),
                Progress(),
            ],
        )
        run.draw_at_finish(draw_run)
        return run.finish(trainer.fit())
