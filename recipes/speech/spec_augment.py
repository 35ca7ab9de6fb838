"""SpecAugment: masks bands and time spans of a spectrogram, drawn again at each visit (Park et al. 2019, section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

import toolkit as tk


class SpecAugment:
    """Hides mel bands and frames of `batch["input"]` (B, T, M) behind `fill` (M,), the mean of each band.

    Each of `masks` pairs hides up to `band_fraction` of the bands and up to `time_fraction` of the frames. Beyond
    the paper, `gain` adds up to so many nats to the log power, and `shift` moves an utterance by up to so many bands,
    as a higher or lower voice would. The changes are a function of (seed, visit), a visit being one utterance in one
    epoch, so a run's loss curve does not depend on the number of processes.
    """

    def __init__(
        self,
        fill: Tensor,
        *,
        seed: int,
        masks: int = 1,
        band_fraction: float = 0.2,
        time_fraction: float = 0.1,
        gain: float = 0.0,
        shift: float = 0.0,
    ):
        self.fill = fill.float()
        self.masks = masks
        self.gain = gain
        self.shift = shift
        self.band_fraction, self.time_fraction = band_fraction, time_fraction
        draws = torch.rand(tk.data.BANK_SIZE, 2 + 4 * masks, generator=tk.generator(seed, "SpecAugment"))
        self.draws = tk.data.VisitDraws(draws)

    def __call__(self, batch: tk.Batch, visits: Tensor) -> tk.Batch:
        """`visits` (int64): epoch * utterances + row of each utterance of the batch."""
        draws = self.draws(visits)
        features = batch["input"].float()
        lengths = batch["input_length"][:, None]
        if self.shift:
            features = _shifted(features, (2 * draws[:, 0] - 1) * self.shift)
        if self.gain:
            features = features + (2 * draws[:, 1, None, None] - 1) * self.gain
        _, frames, bands = features.shape
        hidden = torch.zeros(features.shape, dtype=torch.bool)
        for mask in draws[:, 2:].unflatten(1, (self.masks, 4)).unbind(1):
            width, low, duration, begin = mask.split(1, dim=1)
            hidden |= _stretch(frames, duration * self.time_fraction * lengths, begin, lengths)[:, :, None]
            hidden |= _stretch(bands, width * self.band_fraction * bands, low, bands)[:, None, :]
        return {**batch, "input": torch.where(hidden, self.fill, features)}


def _stretch(size: int, width: Tensor, start: Tensor, length: Tensor | int) -> Tensor:
    """(B, size): true from `start` (0 to 1 of `length` - `width`) for `width` places; both (B, 1)."""
    places = torch.arange(size)
    first = (start * (length - width)).floor()
    return (places >= first) & (places < first + width.floor())


def _shifted(features: Tensor, bands: Tensor) -> Tensor:
    """(B, T, M) moved up by `bands` (B,), between neighbours by a straight line; the outermost bands repeat."""
    places = (torch.arange(features.shape[2]) - bands[:, None]).clamp(0, features.shape[2] - 1)
    below = places.floor().long()
    above = (below + 1).clamp(max=features.shape[2] - 1)
    part = (places - below)[:, None]
    low, high = (features.gather(2, i[:, None].expand(features.shape)) for i in (below, above))
    return low + part * (high - low)
