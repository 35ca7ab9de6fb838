"""What the placement metrics cost: the share of training time spent in them, measured within the run that pays it.

    python benchmarks/speed/metrics_cost.py        about a minute

Four mixtures of 16 experts (width 256, hidden 512, top 2), 256 samples a step, on 1 and 2 processes with experts spread
over them, a line of metrics every 10 and every 50 steps. The clock runs in each forward hook and in the callback, its
reduction and the wait for the other process included. Writes benchmarks/results/metrics_cost.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from tests.support.helpers import run_distributed
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.routing_log import RoutingLog
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.run.config.run import RunConfig
from toolkit.run.run import start_run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.optim import build_optimizer, warmup_cosine
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

DIM, HIDDEN, EXPERTS, LAYERS, BATCH, STEPS, WARMUP = 256, 512, 16, 4, 256, 110, 10
RUNS = 3
spent = 0.0


def timed(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        global spent
        began = time.perf_counter()
        result = fn(*args)
        spent += time.perf_counter() - began
        return result

    return run


class Mixtures(nn.Module):
    def __init__(self, groups: ExpertGroups):
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(make_moe(DIM, HIDDEN, EXPERTS, 2, groups=groups, seed=i) for i in range(LAYERS))
        self.head = nn.Linear(DIM, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Clock(Callback):
    """The time of each step and of its metrics, from the warm-up on."""

    def __init__(self) -> None:
        self.began = 0.0
        self.share: list[float] = []

    def on_step_start(self, trainer: Trainer, micro_batches: list[Any]) -> None:  # noqa: ARG002
        global spent
        if trainer.state.step == WARMUP:
            self.began, spent = time.perf_counter(), 0.0

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.share = [spent, time.perf_counter() - self.began]


def train(log_every: int) -> list[float]:
    """Seconds in the metrics, and in all steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            run_dir=Path(folder) / "run", tracker="none", cpu=True, batch_size=BATCH, log_every=log_every
        )
        with start_run("metrics_cost", config) as run:
            model = Mixtures(make_expert_groups(run.world_size))
            table = TensorTable(input=torch.randn(BATCH * STEPS, DIM), label=torch.randint(10, (BATCH * STEPS,)))
            where = {"rank": run.rank, "world_size": run.world_size}
            clock = Clock()
            Trainer(
                run,
                Classification(),
                model,
                build_optimizer(model, lr=1e-3, config=config.optimizer),
                TrainBatches(table, batch_size=BATCH, seed=0, accumulation=1, **where),
                max_steps=STEPS,
                schedule=warmup_cosine(max_steps=STEPS),
                log_every=log_every,
                callbacks=[ExpertLoad(model), clock],
            ).fit()
    return clock.share


def measure() -> dict[int, list[list[float]]]:
    """What `train` gives in each run, by steps between lines."""
    RoutingLog.add = timed(RoutingLog.add)  # type: ignore[method-assign]
    ExpertLoad.on_step_end = timed(ExpertLoad.on_step_end)  # type: ignore[method-assign]
    return {log_every: [train(log_every) for _ in range(RUNS)] for log_every in (10, 50)}


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    rows = []
    for world in (1, 2):
        for log_every, runs in run_distributed(measure, world, timeout_s=1800)[0].items():
            shares = [100 * metrics / total for metrics, total in runs]
            rows.append(
                {
                    "processes": world,
                    "steps per line": log_every,
                    "ms per step": round(1e3 * statistics.median(total for _, total in runs) / (STEPS - WARMUP), 2),
                    "metrics, % of a step": round(statistics.median(shares), 2),
                    "each run": " ".join(f"{share:.2f}" for share in shares),
                }
            )
    write_report("metrics_cost", rows, layers=LAYERS, experts=EXPERTS, batch=BATCH)


if __name__ == "__main__":
    main()
