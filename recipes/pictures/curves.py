"""Evaluated metrics over epochs as a picture."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import toolkit as tk

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECONDS_BETWEEN = 30
"""Least time between two drawings in training, whose throughput includes them."""


class CurvePicture(tk.Callback):
    """Plot of metrics over epochs, `name`.png, drawn while the run trains and when it ends.

    `labels` has the label of each metric, such as `{"eval/wer": "words"}`. With `percent` the values are fractions.
    """

    def __init__(self, name: str, title: str, labels: Mapping[str, str], *, percent: bool = False):
        self.name, self.title, self.labels, self.percent = name, title, labels, percent
        self._drawn_at = 0.0

    def on_fit_start(self, trainer: tk.Trainer) -> None:
        self._drawn_at = time.monotonic()
        trainer.run.draw_at_finish(self.draw)

    def on_save(self, trainer: tk.Trainer, folder: Path) -> None:  # noqa: ARG002
        is_due = trainer.run.is_main and time.monotonic() > self._drawn_at + SECONDS_BETWEEN
        if is_due and importlib.util.find_spec("matplotlib"):
            with suppress(OSError):  # a full disk is no reason to stop training
                trainer.run.draw(self.draw, {"steps": trainer.state.step})
            self._drawn_at = time.monotonic()

    def draw(self, folder: Path, results: Mapping[str, Any]) -> dict[str, Path]:  # noqa: ARG002
        """Plot the metrics of the run in `folder`; returns the figure by name, none without metrics."""
        lines = list(tk.read_metrics(folder / "metrics.jsonl"))
        curves = {
            label: [(line["train/epoch"], line[name]) for line in lines if line.get(name) is not None]
            for name, label in self.labels.items()
        }
        if not any(curves.values()):
            return {}
        draw = partial(draw_curves, title=self.title, curves=curves, percent=self.percent)
        return {self.name: tk.save_figure(folder / f"{self.name}.png", draw)}


def draw_curves(
    figure: Figure, *, title: str, curves: Mapping[str, Sequence[tuple[float, float]]], percent: bool = False
) -> None:
    """Draw (epoch, value) points by label, with the last value in the legend."""
    from matplotlib.ticker import MaxNLocator

    figure.set_size_inches(7.5, 4)
    axes = figure.subplots()
    for label, points in curves.items():
        if points:
            epochs, values = zip(*points, strict=True)
            scaled = [100 * value if percent else value for value in values]
            last = f"{scaled[-1]:.2f} %" if percent else f"{scaled[-1]:.3f}"
            axes.plot(epochs, scaled, marker="o", ms=4, lw=1.6, label=f"{label} (last {last})")
    axes.set_title(f"{title}, %" if percent else title)
    axes.set_xlabel("epoch")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.grid(axis="y", color="#9aa1ab", alpha=0.25, lw=0.6)
    axes.legend(loc="best")
