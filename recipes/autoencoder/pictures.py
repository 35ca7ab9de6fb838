"""Pictures of a variational autoencoder: reconstructions of test images, and samples of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import toolkit as tk

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure


class AutoencoderPictures(tk.Callback):
    """Plots for a model with `pictures=True`: reconstructions.png and samples.png, drawn when the run ends.

    A test image of each class beside its reconstruction from the mean style and the inferred class, and a row of all
    classes for each of as many styles from the prior.
    """

    def __init__(self, table: tk.TensorTable):
        self.table = table
        self._grids: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: tk.Trainer) -> None:
        trainer.run.draw_at_finish(self.draw)

    @torch.no_grad()
    def on_fit_end(self, trainer: tk.Trainer) -> None:
        labels = self.table.columns["label"]
        rows = torch.stack([(labels == label).nonzero()[0, 0] for label in labels.unique()])
        images, noise = (self.table[rows][name].to(trainer.run.device) for name in ("input", "noise"))
        trainer.model.eval()
        # All ranks do this: a forward pass may be a collective.
        out = trainer.model(images, noise, pictures=True)
        trainer.model.train()
        both = torch.stack([images.flatten(1).float() / 255, out["reconstruction"].float()])
        self._grids = {
            name: grid.unflatten(-1, images.shape[1:]).cpu()
            for name, grid in (("reconstructions", both), ("samples", out["samples"].float()))
        }

    def draw(self, folder: Path, results: Mapping[str, Any]) -> dict[str, Path]:  # noqa: ARG002
        """Draw the images of the end of training; returns the figures by name."""
        classes = [str(label) for label in self.table.columns["label"].unique().tolist()]
        texts = {
            "reconstructions": ("Test images and their reconstructions", ["image", "reconstruction"], "true class"),
            "samples": ("Samples: a style from the prior in each row", [""] * len(classes), "class"),
        }
        return {
            name: tk.save_figure(
                folder / f"{name}.png", partial(draw_grid, grid=grid, columns=classes, texts=texts[name])
            )
            for name, grid in self._grids.items()
        }


def draw_grid(
    figure: Figure, *, grid: Float[Tensor, "R C ..."], columns: Sequence[str], texts: tuple[str, Sequence[str], str]
) -> None:
    """Draw images (rows, columns, height, width), or (..., 3, height, width), between 0 and 1.

    `texts` are the title, the labels of rows and that of columns.
    """
    title, rows, of_columns = texts
    if grid.dim() == 5:
        grid = grid.movedim(2, -1)
    height, width = grid.shape[2:4]
    mosaic = grid.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    figure.set_size_inches(1.6 + 0.6 * len(columns), 1 + 0.6 * len(rows) * height / width)
    axes = figure.subplots()
    axes.imshow(mosaic, cmap="gray", vmin=0, vmax=1)
    axes.set_xticks([(column + 0.5) * width - 0.5 for column in range(len(columns))], columns)
    axes.set_yticks([(row + 0.5) * height - 0.5 for row in range(len(rows))], rows)
    axes.set_xlabel(of_columns)
    axes.set_title(title)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
