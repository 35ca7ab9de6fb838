"""Random views of images: weak and strong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import toolkit as tk
from autoencoder.labels import FewLabels
from digits.affine import DRAWS, AffineRange, warp

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

BANK_SIZES = {"weak view": 65_479, "strong view": 65_449, "labelled view": 65_447}
"""Sizes of tables of precomputed views: primes that `FewLabels` does not use."""


class Views:
    """An `Augment` that sees the images of `few` through random affine maps, other ones at each visit.

    "input" is the weak view of an image, "strong" (B, ...) another one with larger changes, of which a square of
    `blank` pixels is black; labelled images ("paired_input") are changed as strongly, without the square. Without
    `strong` there is no "strong" view.
    """

    def __init__(
        self,
        few: FewLabels,
        *,
        weak: AffineRange,
        strong: AffineRange | None,
        labelled: AffineRange,
        blank: int,
        seed: int,
    ):
        self.few, self.weak, self.strong, self.labelled, self.blank = few, weak, strong, labelled, blank
        self.draws = {
            purpose: tk.data.VisitDraws(2 * torch.rand(size, DRAWS + 2, generator=tk.generator(seed, purpose)) - 1)
            for purpose, size in BANK_SIZES.items()
        }

    def __call__(self, batch: tk.Batch, visits: Tensor) -> tk.Batch:
        """`visits` (int64): epoch * samples + row of each sample of the batch."""
        batch = self.few(batch, visits)
        images = batch["input"]
        draws = self.draws["labelled view"](visits)[:, :DRAWS]
        seen = {"paired_input": warp(batch["paired_input"], draws, self.labelled)}
        seen["input"] = warp(images, self.draws["weak view"](visits)[:, :DRAWS], self.weak)
        if self.strong is not None:
            draws = self.draws["strong view"](visits)
            seen["strong"] = blanked(warp(images, draws[:, :DRAWS], self.strong), draws[:, DRAWS:], self.blank)
        return {**batch, **seen}


def blanked(images: UInt8[Tensor, "N ..."], centres: Float[Tensor, "N 2"], side: int) -> UInt8[Tensor, "N ..."]:
    """`images` with a black square of `side` pixels each (DeVries and Taylor 2017, "Cutout"), about `centres`: y and x,
    from -1 to 1 across the image. It may reach beyond the border."""
    height, width = images.shape[-2:]
    y = (torch.arange(height) + 0.5 - (centres[:, :1] + 1) / 2 * height).abs() <= side / 2
    x = (torch.arange(width) + 0.5 - (centres[:, 1:] + 1) / 2 * width).abs() <= side / 2
    hidden = (y[:, :, None] & x[:, None, :]).view(len(images), *[1] * (images.ndim - 3), height, width)
    return images.masked_fill(hidden, 0)
