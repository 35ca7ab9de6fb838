"""A recipe with a limited micro-batch size on the last rank."""

from typing import Any

import torch

import toolkit as tk
from tests.support.small_run import SmallModel
from tests.support.trainers import standard_trainer
from toolkit.data.table import TensorTable
from toolkit.train.callbacks.expert_balance import BiasBalancing
from toolkit.train.task import Loss


class Config(tk.RunConfig):
    fits: int | None = None
    """Largest micro-batch that fits into the memory of the last rank."""


class Limited(tk.Classification):
    def __init__(self, limit: int | None, **options: Any):
        super().__init__(**options)
        self.limit = limit

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        if self.limit is not None and len(batch["label"]) > self.limit:
            torch.empty(2**50)
        return super().loss(model, batch)


def main(config: Config) -> dict[str, Any]:
    with tk.start_run("limited", config) as run:
        model = SmallModel(tk.experts.make_expert_groups(run.world_size))
        draws = torch.Generator().manual_seed(1)
        table = TensorTable(input=torch.randn(200, 8, generator=draws), label=torch.randint(3, (200,), generator=draws))
        limit = config.fits if run.rank == run.world_size - 1 else None
        task = Limited(limit, penalty=tk.experts.RouterPenalty(model, balance_weight=0.01))
        callbacks = [BiasBalancing()]
        trainer = standard_trainer(run, task, model, train=table, test=table, callbacks=callbacks)
        return run.finish(trainer.fit())


def full() -> Config:
    """Default settings."""
    return Config(batch_size=64, lr=0.02, log_every=2, tracker="none", cpu=True)


if __name__ == "__main__":
    tk.run_recipe(main, {"full": full}, __doc__)
