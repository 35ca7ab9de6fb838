"""Stall of training by a checkpoint, with synchronous and with background saves.

    python benchmarks/speed/checkpoint_stall.py        three minutes on two cores; needs 2 GB on disk

An MoE layer with 32 experts (width 256, hidden 2,048, top 2; 403 MB with AdamW states), on one process with one thread
and a checkpoint every 25 steps. A stall is the time that the callback blocks a step, including the wait for the
previous save. "of a run" is the additional time of the run per save, compared with no checkpoints; the saving thread
has its own core. Values are medians of interleaved rounds. Writes benchmarks/results/checkpoint_stall.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import toolkit as tk
from benchmarks.report import write_report
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.optim import build_optimizer, warmup_cosine

DIM, HIDDEN, EXPERTS, BATCH = 256, 2048, 32, 512
EVERY, SAVES = 25, 4
STEPS = EVERY * (SAVES + 1)
VARIANTS: dict[str, Any] = {
    "no checkpoints": None,
    "written at once": {"in_background": False},
    "in the background": {"in_background": True},
}


class TimedCheckpointing(Checkpointing):
    """Checkpointing that records stalls, and the start and end of training."""

    def __init__(self, options: CheckpointOptions) -> None:
        super().__init__(options)
        self.stalls: list[float] = []
        self.began = self.ended = 0.0

    def on_step_start(self, trainer: tk.Trainer, micro_batches: list[Any]) -> None:
        began = time.perf_counter()
        self.began = self.began or began
        super().on_step_start(trainer, micro_batches)
        step = trainer.state.step
        if step and step % EVERY == 0:
            self.stalls.append(time.perf_counter() - began)

    def on_step_end(self, trainer: tk.Trainer) -> None:  # noqa: ARG002
        self.ended = time.perf_counter()


def run(settings: dict[str, Any] | None) -> tuple[list[float], float]:
    """Return the seconds of each stall except the first, which allocates buffers, and of all steps."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-stall-") as folder:
        config = tk.RunConfig(run_dir=Path(folder) / "run", tracker="none", cpu=True, batch_size=BATCH, max_steps=STEPS)
        with tk.start_run("checkpoint_stall", config) as started:
            torch.manual_seed(0)
            model = torch.nn.Sequential(tk.experts.make_moe(DIM, HIDDEN, EXPERTS, 2), torch.nn.Linear(DIM, 10))
            table = TensorTable(input=torch.randn(4 * BATCH, DIM), label=torch.randint(10, (4 * BATCH,)))
            every = 10 * STEPS if settings is None else EVERY
            timed = TimedCheckpointing(CheckpointOptions(every_steps=every, keep=1, **(settings or {})))
            trainer = tk.Trainer(
                started,
                tk.Classification(),
                model,
                build_optimizer(model, config.replace(lr=1e-4)),
                TrainBatches(table, batch_size=BATCH, seed=0, rank=0, world_size=1),
                max_steps=STEPS,
                schedule=warmup_cosine(max_steps=STEPS),
                log_every=10 * STEPS,
                callbacks=[timed],
            )
            trainer.fit()
    return timed.stalls[1:], timed.ended - timed.began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found: dict[str, list[tuple[list[float], float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, settings in VARIANTS.items():
            found[variant].append(run(settings))
    totals = {variant: statistics.median(seconds for _, seconds in runs) for variant, runs in found.items()}
    stalls = {variant: statistics.median(s for stalls, _ in runs for s in stalls) for variant, runs in found.items()}
    rows = [
        {
            "arm": variant,
            "stall, ms": round(1000 * stalls[variant], 1),
            "of a synchronous save's, %": round(100 * stalls[variant] / stalls["written at once"], 1),
            "of a run, ms per save": round(1000 * (totals[variant] - totals["no checkpoints"]) / SAVES, 1),
            "ms per step without saves": round(1000 * totals["no checkpoints"] / STEPS, 1),
        }
        for variant in list(VARIANTS)[1:]
    ]
    write_report("checkpoint_stall", rows, rounds=rounds, saves=SAVES)


if __name__ == "__main__":
    main()
