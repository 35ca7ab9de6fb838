"""Training speed of parallel forms of a Legendre memory, compared with its recurrent form, at 784 steps.

    python benchmarks/learning/lmu_forms.py

CPU seconds of one thread for a forward and backward pass, medians of interleaved rounds. Outputs and gradients of the
forms are compared first. Writes benchmarks/results/lmu_forms.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.report import write_report
from speech.legendre import Form
from speech.lmu import LMU, ParallelLMU

STEPS = 784
TOLERANCE = 1e-4


def cpu_seconds(train: Callable[[], Tensor]) -> float:
    began = time.process_time()
    train().sum().backward()
    return time.process_time() - began


def unit(form: Form, order: int, channels: int, hidden: int) -> ParallelLMU:
    torch.manual_seed(0)
    return ParallelLMU(1, hidden, order, STEPS, channels=channels, form=form)


def check(module: nn.Module, specification: nn.Module, x: Tensor) -> float:
    """Return the largest difference of outputs and gradients, relative to the largest value."""
    worst, found = 0.0, []
    for each in (module, specification):
        each.zero_grad()
        y = each(x)[0]
        y.square().mean().backward()
        found.append([y.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
        each.zero_grad()
    for a, b in zip(*found, strict=True):
        worst = max(worst, ((a - b).abs().max() / b.abs().max()).item())
    if worst > TOLERANCE:
        raise SystemExit(f"the forms differ by {worst:.1e}")
    return worst


def measure(batch: int, order: int, channels: int, hidden: int, rounds: int) -> list[dict[str, object]]:
    x = torch.rand(batch, STEPS, 1, generator=torch.Generator().manual_seed(0))
    steps, chunks, fft = (unit(form, order, channels, hidden) for form in ("steps", "chunks", "fft"))
    torch.manual_seed(0)
    cell = LMU(1, hidden, order, STEPS)
    forms: dict[str, tuple[Callable[[], Tensor], float]] = {
        "step by step": (lambda: steps(x)[0], 0.0),
        "chunks": (lambda: chunks(x)[0], check(chunks, steps, x)),
        "fft": (lambda: fft(x)[0], check(fft, steps, x)),
        "last state only": (lambda: steps.last(x), 0.0),
        "nonlinear cell": (lambda: cell(x)[0], 0.0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds + 1):
        for name, (train, _) in forms.items():
            seconds[name].append(cpu_seconds(train))
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    base = medians["step by step"]
    return [
        {
            "batch": batch,
            "order": order,
            "signals": channels,
            "form": name,
            "ms per step of training": round(1e3 * medians[name], 2),
            "times as fast": round(base / medians[name], 1),
            "largest relative difference": f"{difference:.0e}",
        }
        for name, (_, difference) in forms.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [*measure(8, 64, 1, 64, args.rounds), *measure(8, 8, 16, 64, args.rounds), *measure(100, 468, 1, 346, 1)]
    write_report("lmu_forms", rows, steps=STEPS, rounds=args.rounds)
