"""The confusion matrix of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import toolkit as tk

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ConfusionPicture(tk.Callback):
    """Plot of the last evaluation of a `VotedClassification`, confusion.png, drawn when the run ends.

    Its labels are the facts `classes` and `test_examples` of the run, if described.
    """

    def on_fit_start(self, trainer: tk.Trainer) -> None:
        trainer.run.draw_at_finish(draw_last_confusion)


def draw_last_confusion(folder: Path, results: Mapping[str, Any]) -> dict[str, Path]:
    """Plot the last `eval/confusion` of the run in `folder`, if any; returns the figure by name."""
    lines = tk.read_metrics(folder / "metrics.jsonl")
    evaluations = [line["eval/confusion"] for line in lines if "eval/confusion" in line]
    if not evaluations:
        return {}
    shares = evaluations[-1]
    classes = results.get("classes", ())
    examples = results.get("test_examples")
    path = folder / "confusion.png"
    return {"confusion": tk.save_figure(path, lambda figure: draw_confusion(figure, shares, classes, examples))}


def draw_confusion(
    figure: Figure, shares: Sequence[Sequence[float]], classes: Sequence[str] = (), examples: int | None = None
) -> None:
    """A row per true class, a column per predicted class; cells in percent of their row.

    `shares` are fractions of all examples. With their number, `examples`, each row is labelled with its count. A class
    that never occurs has an empty row.
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
                ink = "white" if value > 55 else "#30343b"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(size), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(size), [name + count for name, count in zip(names, counts, strict=True)])
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class (examples)" if examples else "true class")
    axes.set_title("Confusion matrix")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, shrink=0.7, label="% of the true class")
    bar.outline.set_visible(False)
