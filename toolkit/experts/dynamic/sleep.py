"""When to sleep, and how to undo a change of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.experts.parallel.unwrapping import unwrapped


@dataclass(frozen=True)
class SleepSchedule:
    """Optimizer steps between two sleeps.

    `adaptive`: every `every` / max(1, growth / 2) steps, where growth = active / initial: more often with more than
    twice the initial number of experts. Always within `min_every` and `max_every`.
    """

    every: int = 1000
    min_every: int = 500
    max_every: int = 2000
    adaptive: bool = True

    def steps(self, active: int, initial: int) -> int:
        wanted = self.every / max(1.0, active / initial / 2) if self.adaptive else self.every
        return round(min(self.max_every, max(self.min_every, wanted)))


class Snapshot:
    """Clones of all tensors of a model and its optimizer on this rank, to restore in place."""

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        states = (value for state in unwrapped(optimizer).state.values() for value in state.values())
        tensors = [*model.parameters(), *model.buffers(), *(value for value in states if isinstance(value, Tensor))]
        self._clones = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, clone in self._clones:
            tensor.copy_(clone)
