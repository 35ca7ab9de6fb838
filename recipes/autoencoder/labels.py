"""Few labels, some of them wrong: the labelled images, and the draws of each visit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

import toolkit as tk

if TYPE_CHECKING:
    from jaxtyping import Integer

Corruption = Literal["fixed", "resampled"]
UNLABELLED = -1
BANK_SIZES = {"noise": 65_521, "pairs": 65_519, "corruption": 65_497, "direction": 4_093}
"""Sizes of tables of precomputed draws: primes, so that visits run through all rows, and different, so that the draws
for one purpose are independent of the others."""


def balanced_rows(labels: Integer[Tensor, " N"], count: int, num_classes: int, *, seed: int) -> Tensor:
    """Return sorted rows of `count` of `labels` (N,), balanced by class, fixed by `seed`.

    Raises UserError if there are too few, or `count` is less than one per class.
    """
    if not num_classes <= count <= len(labels):
        raise tk.UserError(f"labels={count}: take {num_classes} to {len(labels)}, at least one of each class.")
    draws = tk.generator(seed, "labelled images")
    shares = torch.full((num_classes,), count // num_classes)
    shares[torch.randperm(num_classes, generator=draws)[: count % num_classes]] += 1
    chosen = []
    for label, share in enumerate(shares.tolist()):
        rows = (labels == label).nonzero()[:, 0]
        if len(rows) < share:
            raise tk.UserError(f"labels={count}: class {label} has only {len(rows)} images: take fewer labels.")
        chosen.append(rows[torch.randperm(len(rows), generator=draws)[:share]])
    return torch.cat(chosen).sort().values


def corrupted(labels: Integer[Tensor, " N"], rate: float, num_classes: int, *, seed: int) -> Integer[Tensor, " N"]:
    """`labels` with round(rate * N) of them replaced by a wrong class each, drawn evenly: fixed by `seed`."""
    draws = tk.generator(seed, "fixed corruption")
    hit = torch.randperm(len(labels), generator=draws)[: round(rate * len(labels))]
    shift = torch.randint(1, num_classes, (len(hit),), generator=draws)
    wrong = labels.clone()
    wrong[hit] = (labels[hit] + shift) % num_classes
    return wrong


class FewLabels:
    """A training table of which few rows have labels, and the draws of each visit; an `Augment` for it.

    `table` has the columns "input" and "label", which is -1 but for `labels` images (None: all),
    see `balanced_rows`. These labels, right or wrong, are all that is known. To each image of a batch a visit adds one
    of the labelled ("paired_input", "paired_label"), and standard normal draws: "noise" (B, *noise_shape), and
    "direction" (B, pixels) if `directions`.

    corruption "fixed" gives `rate` of the labelled images one wrong label for good; "resampled" gives each labelled
    image a wrong label at `rate` of its visits, another one each time, which averages out. Raises UserError for
    another word.
    """

    def __init__(
        self,
        full: tk.TensorTable,
        labels: int | None,
        *,
        num_classes: int,
        seed: int,
        rate: float = 0.0,
        corruption: Corruption = "resampled",
        noise_shape: Sequence[int] = (),
        directions: bool = False,
    ):
        images = full.columns["input"]
        truth = full.columns["label"]
        rows = torch.arange(len(truth)) if labels is None else balanced_rows(truth, labels, num_classes, seed=seed)
        known = truth[rows]
        if corruption == "fixed":
            known = corrupted(known, rate, num_classes, seed=seed)
        label = torch.full((len(full),), UNLABELLED)
        label[rows] = known
        self.table = tk.TensorTable(input=images, label=label)
        self.rows, self.known, self.num_classes = rows, known, num_classes
        self.images = images[rows]
        pairs = torch.randint(len(rows), (BANK_SIZES["pairs"],), generator=tk.generator(seed, "pairs"))
        draws = tk.generator(seed, "resampled corruption")
        size = BANK_SIZES["corruption"]
        hit = torch.rand(2, size, generator=draws) < (rate if corruption == "resampled" else 0)
        shift = torch.randint(1, num_classes, (2, size), generator=draws) * hit
        self.pairing = tk.data.VisitDraws(pairs)
        self.shift_label = tk.data.VisitDraws(shift[0])
        self.shift_pair = tk.data.VisitDraws(shift[1])
        self.noise = _normal_draws(*noise_shape, seed=seed, purpose="noise") if noise_shape else None
        pixels = images[0].numel()
        # Fewer rows: the start of a power iteration matters little, and an image is long.
        self.direction = _normal_draws(pixels, seed=seed, purpose="direction") if directions else None

    def __call__(self, batch: tk.Batch, visits: Tensor) -> tk.Batch:
        """`visits` (int64): epoch * samples + row of each sample of the batch."""
        label = batch["label"]
        pair = self.pairing(visits)
        label = torch.where(label == UNLABELLED, label, (label + self.shift_label(visits)) % self.num_classes)
        more = {
            "label": label,
            "paired_input": self.images.index_select(0, pair),
            "paired_label": (self.known.index_select(0, pair) + self.shift_pair(visits)) % self.num_classes,
        }
        if self.noise is not None:
            more["noise"] = self.noise(visits)
        if self.direction is not None:
            more["direction"] = self.direction(visits)
        return {**batch, **more}


def with_noise(table: tk.TensorTable, noise_shape: Sequence[int], *, seed: int) -> tk.TensorTable:
    """`table` with a column "noise" (N, *noise_shape) of standard normal draws, the same at each evaluation.

    Without a shape, `table` as it is.
    """
    if not noise_shape:
        return table
    noise = torch.randn(len(table), *noise_shape, generator=tk.generator(seed, "evaluation noise"))
    return tk.TensorTable(**table.columns, noise=noise)


def _normal_draws(*shape: int, seed: int, purpose: str) -> tk.data.VisitDraws:
    """Standard normal draws of `shape` per visit."""
    return tk.data.VisitDraws(torch.randn(BANK_SIZES[purpose], *shape, generator=tk.generator(seed, purpose)))


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Number of rows of `logits`, shape (B, C), with their maximum at the label."""
    return (logits.argmax(-1) == labels).sum()
