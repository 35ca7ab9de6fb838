"""The callback that fills a `ReplayMemory` while training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.data.replay_memory import ReplayMemory
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


class Remember(Callback):
    """Adds the rows that were trained on to `memory`, every `every` steps.

    Reads them from the order of the data and not from the batches, so that every rank adds the rows of all ranks.
    """

    def __init__(self, memory: ReplayMemory, *, every: int = 10):
        self.memory, self.every = memory, every
        self._batches: Iterator[Tensor] | None = None

    def on_fit_start(self, trainer: Trainer) -> None:  # noqa: ARG002
        self._batches = None  # made in `on_step_end`, when the step that training continues from is known

    def on_step_end(self, trainer: Trainer) -> None:
        step = trainer.state.step
        if self._batches is None:
            self._batches = trainer.batches.order.batches((step - 1) // self.every * self.every)
        if step % self.every == 0:
            self.memory.add(torch.cat(list(islice(self._batches, self.every))))

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)
