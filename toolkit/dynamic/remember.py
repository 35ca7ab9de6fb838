"""Callbacks of experience replay: filling a `ReplayMemory` while training, and adding its examples to each step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.data.replay_memory import ReplayMemory
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.data.table import Batch
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


class Replay(Callback):
    """Adds `count` remembered examples, over all ranks, to each step (experience replay, Chaudhry et al. 2019,
    arXiv 1902.10486), augmented as the others are. Nothing is added while the memory is empty.

    Has no state: the draw is a function of the seed, the step and the memory, whose state `Remember` saves.
    """

    def __init__(self, memory: ReplayMemory, count: int):
        self.memory, self.count = memory, count

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        if not len(self.memory):
            return
        visits = self.memory.draw_visits(self.count, trainer.state.step)
        for batch, mine in zip(micro_batches, trainer.batches.parts_of(visits), strict=True):
            remembered = trainer.batches.seen(mine)
            for name, column in batch.items():
                batch[name] = torch.cat([column, remembered[name]])
