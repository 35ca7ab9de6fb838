"""A recipe that maps 128 MiB for each sample of a micro-batch: what test_out_of_memory.py runs."""

from __future__ import annotations

import resource
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import toolkit as tk
from tests.support.small_run import SmallModel
from tests.support.trainers import standard_trainer
from toolkit.data.table import TensorTable
from toolkit.train.callbacks.expert_balance import BiasBalancing
from toolkit.train.task import Loss


class Config(tk.RunConfig):
    limit_mib: int | None = None
    """Memory that a process may map beyond what it has when training begins."""
    rank_1_fits: int | None = None
    """Samples of a micro-batch that fit into the memory of rank 1."""


class Hungry(tk.Classification):
    def __init__(self, config: Config, rank: int, **options: Any):
        super().__init__(**options)
        self.config, self.rank = config, rank
        # Kept: of freed memory the C library may break off a piece, and then cannot use it for the next step.
        self.buffer = torch.empty(0)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        size = len(batch["label"])
        if len(self.buffer) < size:
            self.buffer = torch.empty(size, 2**25)
        if self.rank == 1 and self.config.rank_1_fits is not None and size > self.config.rank_1_fits:
            torch.empty(2**50)
        return super().loss(model, batch)


def main(config: Config) -> dict[str, Any]:
    if config.limit_mib is not None:
        limit = psutil.Process().memory_info().vms + config.limit_mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    with tk.start_run("hungry", config) as run:
        model = SmallModel(tk.experts.make_expert_groups(run.world_size))
        draws = torch.Generator().manual_seed(1)
        table = TensorTable(input=torch.randn(200, 8, generator=draws), label=torch.randint(3, (200,), generator=draws))
        task = Hungry(config, run.rank, penalty=tk.experts.RouterPenalty(model, balance_weight=0.01))
        callbacks = [BiasBalancing(model)]
        trainer = standard_trainer(run, task, model, train=table, test=table, callbacks=callbacks)
        return run.finish(trainer.fit())


def full() -> Config:
    """The only one."""
    return Config(batch_size=64, lr=0.02, log_every=2, tracker="none", cpu=True)


if __name__ == "__main__":
    tk.run_recipe(main, {"full": full}, __doc__)
