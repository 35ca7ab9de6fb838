"""Pictures of a run, drawn from its files when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.run.pictures.plots import draw_plots
from toolkit.run.summary import moves


def draw_run(folder: Path, results: Mapping[str, Any]) -> dict[str, Path]:
    """Draw the finished run in `folder`; return the pictures by name."""
    return draw_plots(folder, results.get("expert_placement"), moves(results))
