"""The loads of each training forward, kept until somebody asks: no arithmetic and no waiting in between."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit.moe.load.metrics import RowBytes
from toolkit.moe.stack import ExpertStack, expert_stacks
from toolkit.placement.placement import ExpertPlacement


class Forwards(NamedTuple):
    """Forwards in a row under the same placements."""

    placements: tuple[ExpertPlacement, ...]
    """One per layer."""
    sent_FLE: Tensor
    """int64, on the device: this rank's routed copies that went to experts."""
    dropped_FLE: Tensor
    """Those that a capacity dropped."""
    crossings_FL: Tensor
    """int64: `ExpertStack.last_crossings` of each forward; 0 where nobody asked for it."""


class ForwardLoads:
    """Listens to the expert layers of `model`. A forward that activation checkpointing computes again, and one without
    gradients, is not counted: what counts is when `ExpertStack.load_E` moved."""

    def __init__(self, model: nn.Module):
        named = expert_stacks(model)
        self.names, self.stacks = [name or "moe" for name in named], list(named.values())
        self.row_bytes = [RowBytes(0, 0)] * len(self.stacks)
        self._seen = [stack.load_E for stack in self.stacks]
        self._dropped: list[Tensor | None] = [None] * len(self.stacks)
        self._notes: list[list[tuple[ExpertPlacement, Tensor, Tensor, Tensor]]] = [[] for _ in self.stacks]
        index = {id(stack): i for i, stack in enumerate(self.stacks)}
        self.may_drop = any(getattr(module, "capacity", None) is not None for module in model.modules())
        """Whether any layer has a capacity."""
        self._routers: list[Any] = [None] * len(self.stacks)
        for module in model.modules():
            stack = getattr(module, "expert_stack", None)
            if isinstance(stack, ExpertStack):
                self._routers[index[id(stack)]] = getattr(module, "router", None)
                module.register_forward_hook(partial(self._note, index[id(stack)]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Whoever copies a model copies its hooks; what a copy does moves no `load_E` of ours and is not counted."""
        return self

    def __len__(self) -> int:
        """Forwards that wait to be taken."""
        return len(self._notes[0]) if self._notes else 0

    def active(self) -> NDArray[np.bool_]:
        """(L, E): which experts of each layer there are, where some seats are vacant. Waits for the device."""
        layers = zip(self._routers, self.stacks, strict=True)
        taken = [getattr(router, "active_E", torch.ones_like(stack.load_E)) for router, stack in layers]
        return np.stack([active_E.cpu().numpy().astype(bool) for active_E in taken]) if taken else np.ones((0, 0), bool)

    def _note(self, index: int, module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        stack = self.stacks[index]
        if stack.load_E is self._seen[index]:
            return
        self._seen[index] = stack.load_E
        load_E = stack.last_load_E
        dropped_E = torch.zeros_like(load_E)
        if getattr(module, "capacity", None) is not None:
            before, self._dropped[index] = self._dropped[index], module.dropped_E
            dropped_E = module.dropped_E if before is None else module.dropped_E - before
        self._notes[index].append((stack.placement, load_E - dropped_E, dropped_E, stack.last_crossings))
        self.row_bytes[index] = RowBytes(_row_bytes(inputs[0] if inputs else output), _row_bytes(output))

    def take(self) -> list[Forwards]:
        """What was noted since the last time, in order. Raises RuntimeError where layers were not called alike."""
        if len({len(notes) for notes in self._notes}) > 1:
            raise RuntimeError(
                "some expert layers were called more often than others, so their loads cannot be laid side by side: "
                f"{dict(zip(self.names, map(len, self._notes), strict=True))}"
            )
        notes = list(zip(*self._notes, strict=True))
        for waiting in self._notes:
            waiting.clear()
        taken = []
        for placements, group in itertools.groupby(notes, key=lambda forward: tuple(note[0] for note in forward)):
            forwards = list(group)
            tensors = [
                torch.stack([torch.stack([note[part] for note in forward]) for forward in forwards])
                for part in (1, 2, 3)
            ]
            taken.append(Forwards(placements, *tensors))
        return taken


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[-1] * rows.element_size()
