"""A confusion matrix as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#30343b"


def draw_confusion(
    figure: Figure, shares: Sequence[Sequence[float]], classes: Sequence[str] = (), examples: int | None = None
) -> Figure:
    """One row per true class, one column per answer; cells in percent of the row, coloured by it.

    `shares` are shares of all examples. With their number, `examples`, each row says how many it holds. A class that
    never occurs has an empty row.
    """
    totals = [sum(row) for row in shares]
    percent = [[100 * cell / (sum(row) or 1) for cell in row] for row in shares]
    size = len(shares)
    names = [name.replace("_", " ") for name in classes] or [str(i) for i in range(size)]
    counts = [f"  ({round(total * examples):,})" if examples else "" for total in totals]
    figure.set_size_inches(3.2 + 0.52 * size, 2.4 + 0.44 * size)
    axes = figure.subplots()
    image = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for row, cells in enumerate(percent):
        for column, value in enumerate(cells):
            if value >= 0.5:
                ink = "white" if value > 55 else INK
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(size), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(size), [name + count for name, count in zip(names, counts, strict=True)])
    axes.set_xlabel("answer")
    axes.set_ylabel("truth (examples)" if examples else "truth")
    axes.set_title("Confusion matrix, % of each true class")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, shrink=0.7)
    bar.outline.set_visible(False)
    return figure
