"""Pictures of continual learning: accuracy on each task after each task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.run.pictures.plots import GREY, INK, palette, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Matrix = Sequence[Sequence[float]]
"""(T, T) accuracies, as fractions: row i on each task after task i was learned."""


def draw_accuracy_matrices(path: Path, panels: Mapping[str, Matrix], *, columns: int = 4) -> None:
    """Heat maps of the accuracy on each task after each task was trained. Tasks not yet trained are pale."""
    save_figure(path, lambda figure: _draw_matrices(figure, panels, columns))


def _draw_matrices(figure: Figure, panels: Mapping[str, Matrix], columns: int) -> None:
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure.set_size_inches(2.9 * columns + 0.8, 2.9 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, matrix) in zip(grid.flat, panels.items(), strict=False):
        tasks = range(1, len(matrix) + 1)
        image = axes.imshow([[100 * a for a in row] for row in matrix], cmap="viridis", vmin=0, vmax=100)
        for i, row in enumerate(matrix):
            for j, accuracy in enumerate(row):
                ink = "white" if accuracy < 0.6 else INK
                learned = j <= i
                text = axes.text(j, i, f"{100 * accuracy:.0f}", ha="center", va="center", color=ink, fontsize=9)
                text.set_alpha(1.0 if learned else 0.55)
        axes.set_title(title)
        axes.set_xticks(range(len(matrix)), tasks)
        axes.set_yticks(range(len(matrix)), tasks)
        axes.set_xlabel("tested on task")
        axes.set_ylabel("after learning task")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=grid, shrink=0.7, label="accuracy, %", pad=0.02)


def draw_average_accuracies(path: Path, panels: Mapping[str, Mapping[str, Sequence[Matrix]]]) -> None:
    """A panel per stream, a line per method: the mean accuracy on the tasks learned so far, after each task.

    `panels` holds a matrix per seed; bands are two standard errors of their mean.
    """
    save_figure(path, lambda figure: _draw_averages(figure, panels))


def _draw_averages(figure: Figure, panels: Mapping[str, Mapping[str, Sequence[Matrix]]]) -> None:
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = dict(zip(names, palette(len(names)), strict=True))
    figure.set_size_inches(4.2 * len(panels), 4.4)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        for place, (name, matrices) in enumerate(lines.items()):
            curves = [[statistics.mean(row[: i + 1]) for i, row in enumerate(matrix)] for matrix in matrices]
            points = list(zip(*curves, strict=True))
            tasks = range(1, len(points) + 1)
            means = [100 * statistics.mean(point) for point in points]
            # Broad lines below narrow ones, because methods with equal results draw the same line.
            width = 1.4 + 0.4 * (len(lines) - 1 - place)
            axes.plot(tasks, means, color=colours[name], marker="o", ms=width + 3, lw=width, label=name)
            if len(curves) > 1:
                errors = [200 * statistics.stdev(point) / math.sqrt(len(point)) for point in points]
                low = [max(0, mean - error) for mean, error in zip(means, errors, strict=True)]
                high = [min(100, mean + error) for mean, error in zip(means, errors, strict=True)]
                axes.fill_between(tasks, low, high, color=colours[name], alpha=0.18, lw=0)
        axes.set_title(title)
        axes.set_xlabel("tasks learned")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    grid[0].set_ylabel("accuracy on the tasks learned so far, %")
    handles = {handle.get_label(): handle for axes in grid for handle in axes.get_lines()}
    figure.legend(handles.values(), list(map(str, handles)), loc="outside lower center", ncols=min(4, len(names)))
