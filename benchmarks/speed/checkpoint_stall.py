"""How long training stands still for a checkpoint: written at once, and by a thread while training goes on.

    python benchmarks/speed/checkpoint_stall.py        three minutes on two cores, and 2 GB of the disk

A mixture of 32 experts (width 256, hidden 2,048, top 2; 403 MB with AdamW's states), on one process with one thread, a
checkpoint every 25 steps. A stall is the time that the callback keeps a step waiting, the wait for the save before
included. "of a run" is what the whole run takes longer than one without checkpoints, per save: of two cores the thread
has one for itself. Rounds are interleaved; figures are medians. Writes benchmarks/results/checkpoint_stall.json.
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
ARMS: dict[str, Any] = {
    "no checkpoints": None,
    "written at once": {"in_background": False},
    "in the background": {"in_background": True},
}


class TimedCheckpointing(Checkpointing):
    """Notes how long each save keeps the step waiting, and when the steps began and ended."""

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
    """Seconds of each stall but the first, which makes the buffers; seconds of all steps."""
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
    found: dict[str, list[tuple[list[float], float]]] = {arm: [] for arm in ARMS}
    for _ in range(rounds):
        for arm, settings in ARMS.items():
            found[arm].append(run(settings))
    whole = {arm: statistics.median(seconds for _, seconds in runs) for arm, runs in found.items()}
    stalls = {arm: statistics.median(s for stalls, _ in runs for s in stalls) for arm, runs in found.items()}
    rows = [
        {
            "arm": arm,
            "stall, ms": round(1000 * stalls[arm], 1),
            "of a synchronous save's, %": round(100 * stalls[arm] / stalls["written at once"], 1),
            "of a run, ms per save": round(1000 * (whole[arm] - whole["no checkpoints"]) / SAVES, 1),
            "ms per step without saves": round(1000 * whole["no checkpoints"] / STEPS, 1),
        }
        for arm in list(ARMS)[1:]
    ]
    write_report("checkpoint_stall", rows, rounds=rounds, saves=SAVES)


if __name__ == "__main__":
    main()
