"""Pictures of a run, drawn from its files when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.run.pictures.plots import draw_plots
from toolkit.run.summary import moves
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


class Pictures(Callback):
    """Has `Run.finish` draw loss, accuracy, expert load and placement, as far as the run recorded them.

    They lie in the run's folder as *.png, and go to trackers.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.run.draw_at_finish(draw_run)


def draw_run(folder: Path, results: Mapping[str, Any]) -> dict[str, Path]:
    """Draw the finished run in `folder`; return the pictures by name."""
    return draw_plots(folder, results.get("expert_placement"), moves(results))
