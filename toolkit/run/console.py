"""Console output: one aligned line per log step, and whether a progress bar can be drawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any


def can_redraw() -> bool:
    """Whether both output streams are a terminal that a progress bar can be drawn on."""
    if os.environ.get("CI") or os.environ.get("TERM", "") == "dumb":
        return False
    return sys.stdout.isatty() and sys.stderr.isatty()


def metrics_line(values: Mapping[str, Any], step: int, max_steps: int) -> str:
    """`step  1,200/4,690  epoch 1.28  loss 0.0921  acc 97.3 %  lr 1.8e-03  14,200 samples/s`, as far as known."""
    parts = [f"step {step:>{len(f'{max_steps:,}')},}/{max_steps:,}"]
    if (epoch := values.get("train/epoch")) is not None:
        parts.append(f"epoch {epoch:5.2f}")
    parts += _loss_and_accuracy(values, "train", "")
    if (rate := values.get("train/learning_rate")) is not None:
        parts.append(f"lr {rate:.1e}")
    if (speed := values.get("perf/samples_per_second")) is not None:
        parts.append(f"{speed:>7,.0f} samples/s")
    parts += _loss_and_accuracy(values, "eval", "test ")
    return "  ".join(parts)


def _loss_and_accuracy(values: Mapping[str, Any], group: str, label: str) -> list[str]:
    parts = []
    if (loss := values.get(f"{group}/loss")) is not None:
        parts.append(f"{label}loss {loss:.4f}")
    if (accuracy := values.get(f"{group}/accuracy")) is not None:
        parts.append(f"{label}acc {100 * accuracy:5.2f} %")
    return parts
