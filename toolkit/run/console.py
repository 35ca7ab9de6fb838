"""Console output: one aligned line per log step."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from toolkit.run.tracking.metric_names import is_share

WIDTH = 100
"""Maximum columns of a log line, also on a wider terminal."""
PARTS = {
    "train/epoch": "epoch {:5.2f}",
    "train/loss": "loss {:.4f}",
    "train/accuracy": "acc {:5.2f} %",
    "train/learning_rate": "lr {:.1e}",
    "perf/samples_per_second": "{:>7,.0f} samples/s",
    "validation/loss": "val loss {:.4f}",
    "validation/accuracy": "val acc {:5.2f} %",
    "eval/loss": "test loss {:.4f}",
    "eval/accuracy": "test acc {:5.2f} %",
}
"""Metrics of a log line, in order."""


def columns() -> int:
    """Return the maximum line width here."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def describe_processes(count: int) -> str:
    """Return "1 process", "2 processes", ..."""
    return f"{count} process{'' if count == 1 else 'es'}"


def print_nowhere() -> None:
    """Redirect stdout, including buffered output, to the null device. A flush of a closed pipe would fail again when
    Python exits."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def log_line(line: str) -> None:
    """Print `line` to standard error at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def metrics_line(
    values: Mapping[str, Any], step: int, max_steps: int, seconds_left: float | None = None, width: int = WIDTH
) -> str:
    """Return `step  1,200/4,690  epoch 1.28  loss 0.0921  acc 97.3 %  lr 1.8e-03  14,200 samples/s  eta 0:42`.

    Unknown values are left out, and the least important values if the line is longer than `width`.
    """
    parts = {"step": f"step {step:>{len(f'{max_steps:,}')},}/{max_steps:,}"}
    parts |= {
        name: form.format(100 * values[name] if is_share(name) else values[name])
        for name, form in PARTS.items()
        if values.get(name) is not None
    }
    if seconds_left is not None:
        left = str(timedelta(seconds=round(seconds_left)))
        parts["eta"] = f"eta {left.removeprefix('0:').removeprefix('0')}"
    evaluated = ("validation/accuracy", "eval/accuracy", "validation/loss", "eval/loss")
    of_training = ("train/learning_rate", "perf/samples_per_second", "train/epoch", "train/accuracy", "train/loss")
    for least in (*of_training, *evaluated):
        if len("  ".join(parts.values())) > width:
            parts.pop(least, None)
    return "  ".join(parts.values())
