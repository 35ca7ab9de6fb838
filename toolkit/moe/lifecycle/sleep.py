"""When a mixture sleeps, and how it can wake up as it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.parallel.unwrapping import unwrapped


@dataclass(frozen=True)
class SleepSchedule:
    """Optimizer steps between two sleeps.

    `adaptive`: a population that outgrew 1.5 times its initial size sleeps more often, every
    `every` / max(1, growth / 2) steps with growth = living / initial. Always within `least` and `most`.
    """

    every: int = 1000
    least: int = 500
    most: int = 2000
    adaptive: bool = True

    def steps(self, active: int, initial: int) -> int:
        growth = active / initial
        wanted = self.every / max(1.0, growth / 2) if self.adaptive and growth > 1.5 else self.every
        return round(min(self.most, max(self.least, wanted)))


class Snapshot:
    """All tensors of a model and its optimizer on this rank, copied, to go back to in place."""

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        states = (value for state in unwrapped(optimizer).state.values() for value in state.values())
        tensors = [*model.parameters(), *model.buffers(), *(value for value in states if isinstance(value, Tensor))]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)
