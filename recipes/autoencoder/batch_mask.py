"""Labels by the batch, as the reference of `recipes/vae_robustness.py` chose them.

Which batches of an epoch have labels is drawn once, and the images are shuffled each epoch, so that in time most images
are seen with their label. It is here to reproduce published figures; `FewLabels` keeps the
promise of few.
"""

from __future__ import annotations

import random
from collections.abc import Collection

import torch

import toolkit as tk


class WholeBatches(tk.data.BatchOrder):
    """An epoch ends before its last, short batch."""

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    def epoch(self, epoch: int) -> torch.Tensor:
        """Return all row numbers in the order of `epoch`, without a short last batch."""
        return super().epoch(epoch)[: self.steps_per_epoch * self.batch_size]

    def samples_before(self, step: int) -> int:
        """Return the number of samples before `step`."""
        return step * self.batch_size


class BatchMask(tk.Callback):
    """Takes the labels (-1 in their place) from all batches but those at `places` of each epoch."""

    def __init__(self, places: Collection[int]):
        self.places = frozenset(places)

    def on_step_start(self, trainer: tk.Trainer, micro_batches: list[tk.Batch]) -> None:
        if trainer.state.step % trainer.batches.steps_per_epoch not in self.places:
            for batch in micro_batches:
                batch["label"] = torch.full_like(batch["label"], -1)


def reference_mask(num_samples: int, labels: int, batch_size: int, *, seed: int) -> tuple[WholeBatches, BatchMask]:
    """Return the data order, and a mask with `labels` expected labels, from Python's generator with `seed`."""
    order = WholeBatches(num_samples=num_samples, batch_size=batch_size, seed=seed)
    draws = random.Random(seed)
    chosen = [place for place in range(order.steps_per_epoch) if draws.random() < labels / num_samples]
    return order, BatchMask(chosen)
