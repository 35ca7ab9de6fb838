"""Plots of a run, drawn from its files when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.run.pictures.plots import Experts, draw_experts, draw_losses
from toolkit.run.summary import moves
from toolkit.run.tracking.jsonl import read_metrics


def draw_run(folder: Path, results: Mapping[str, Any]) -> dict[str, Path]:
    """Draw the finished run in `folder`; return its plots by name."""
    lines = list(read_metrics(folder / "metrics.jsonl"))
    experts = Experts.of(lines, results)
    return draw_losses(folder, lines) | draw_experts(folder, experts, lines, moves(results))
