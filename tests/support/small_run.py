"""A small run with all kinds of state, for tests of interruption and resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import toolkit as tk
from toolkit.data.batches import EvalBatches, TrainBatches
from toolkit.data.table import TensorTable
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.expert_balance import BiasBalancing
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.callbacks.preemption import Preemption
from toolkit.train.optim import build_optimizer, warmup_cosine

DIM, CLASSES, SAMPLES, BATCH, EPOCHS = 8, 3, 95, 10, 2
STEPS_PER_EPOCH = 10  # the last batch has five samples
STEPS = EPOCHS * STEPS_PER_EPOCH


class SmallConfig(tk.RunConfig):
    experts: int = 4


class SmallModel(nn.Module):
    def __init__(self, groups: ExpertGroups, experts: int = 4):
        super().__init__()
        self.stem = nn.Linear(DIM, 16)
        self.dropout = nn.Dropout(0.1)
        self.moe = tk.experts.make_moe(16, 12, experts, 2, groups=groups, router=RouterOptions(balance="bias"))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.dropout(self.stem(x).relu())))


class Stop(tk.Callback):
    """End the run at `step` on `rank` by an exception or the signal `how`; record the samples of each step."""

    def __init__(self, step: int | None = None, how: str = "", rank: int = 0):
        self.step, self.how, self.rank = step, how, rank
        self.samples: list[tuple[int, list[int]]] = []

    def on_step_start(self, trainer: tk.Trainer, micro_batches: list[dict[str, Tensor]]) -> None:
        ids = torch.cat([batch["id"] for batch in micro_batches]).tolist()
        self.samples.append((trainer.state.step, ids))

    def on_step_end(self, trainer: tk.Trainer) -> None:
        if trainer.state.step % 3 == 1:  # kept until the next log step
            trainer.record("own/step", trainer.state.step)
        if trainer.state.step == self.step and trainer.run.rank == self.rank:
            if self.how == "exception":
                raise RuntimeError("out of luck")
            os.kill(os.getpid(), getattr(signal, self.how))


def small_config(folder: Path | None, **settings: Any) -> SmallConfig:
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "lr": 0.02, "log_every": 3} | settings
    return SmallConfig(run_dir=folder, tracker="none", cpu=True, **settings)


@contextmanager
def small_trainer(
    config: SmallConfig, stop: Stop | None = None, *, ep_size: int = 1, callbacks: Sequence[tk.Callback] = ()
) -> Iterator[tk.Trainer]:
    with tk.start_run("small", config) as run:
        model = SmallModel(make_expert_groups(ep_size), config.experts)
        draws = torch.Generator().manual_seed(1)
        table = TensorTable(
            input=torch.randn(SAMPLES, DIM, generator=draws),
            label=torch.randint(CLASSES, (SAMPLES,), generator=draws),
            id=torch.arange(SAMPLES),
        )
        shard = {"rank": run.rank, "world_size": run.world_size}
        accumulation = config.gradient_accumulation_steps
        yield tk.Trainer(
            run,
            tk.Classification(penalty=tk.experts.RouterPenalty(model, balance_weight=0.01)),
            model,
            build_optimizer(model, config),
            TrainBatches(table, batch_size=config.batch_size, seed=config.seed, accumulation=accumulation, **shard),
            max_steps=config.max_steps or STEPS,
            schedule=warmup_cosine(max_steps=STEPS),
            log_every=config.log_every,
            callbacks=[
                BiasBalancing(),
                ExpertLoad(),
                Evaluation(EvalBatches(table, batch_size=40, **shard)),
                *callbacks,
                Checkpointing(config.checkpoint),
                stop or Stop(),
                Preemption(),
            ],
        )


@dataclass
class Outcome:
    """Weights, metrics and samples of a run."""

    weights: dict[str, Tensor]
    moments: dict[int, dict[str, Tensor]]
    metrics: list[dict[str, Any]]
    results: dict[str, Any]
    samples: dict[int, list[int]]

    def assert_equals(self, other: Outcome) -> None:
        for name, value in other.weights.items():
            assert torch.equal(self.weights[name], value), name
        for index, state in other.moments.items():
            for name, value in state.items():
                assert torch.equal(self.moments[index][name], value), (index, name)
        assert self.metrics == other.metrics
        assert self.results == other.results
        assert self.samples == other.samples


def train(config: SmallConfig, stop: Stop | None = None, *, ep_size: int = 1) -> Outcome:
    """Train to the end or until `stop`."""
    stop = stop or Stop()
    with small_trainer(config, stop, ep_size=ep_size) as trainer:
        results = trainer.fit()
        optimizer = trainer.optimizer.optimizer.state_dict()["state"]
        state = trainer.raw_model.state_dict(keep_vars=True)
        weights = {name: value.detach().clone() for name, value in state.items()}
    if dist.is_initialized():
        dist.barrier()
    metrics = list(read_metrics(config.run_dir / "metrics.jsonl"))
    return Outcome(weights, optimizer, metrics, results, dict(stop.samples))
