"""The training forwards of a model, all expert layers side by side."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit.moe.load.metrics import RowBytes
from toolkit.moe.load.routing_log import Choices, RoutedForward
from toolkit.moe.stack import expert_stacks
from toolkit.placement.placement import ExpertPlacement


class Forwards(NamedTuple):
    """Consecutive forwards under the same placements; counts of this rank, on the device."""

    placements: tuple[ExpertPlacement, ...]
    """One per layer."""
    sent_FLE: Tensor
    """int64: assignments that were sent to experts."""
    dropped_FLE: Tensor
    """int64: assignments that a capacity dropped."""
    crossings_FLR: Tensor
    """int64: distinct tokens that went to each other node, numbered within the EP group, of which there are at most as
    many as ranks; 0 where `ExpertStack.count_crossings` was not called."""
    last_choices: list[Choices | None]
    """Of the last of these forwards, per layer; None unless asked for."""


class ModelForwards:
    """Reads the routing logs of all expert layers of `model`, from now on; with `choices` also each token's experts."""

    def __init__(self, model: nn.Module, *, choices: bool = False):
        named = expert_stacks(model)
        self.names = [name or "moe" for name in named]
        self.stacks = list(named.values())
        self.row_bytes = [RowBytes(0, 0)] * len(self.stacks)
        """Of the last forward that was taken, per layer."""
        self._layers: list[Any] = [model.get_submodule(name) for name in named]
        self._cursors = [stack.log.follow(choices=choices) for stack in self.stacks]
        self.may_drop = any(getattr(layer, "capacity", None) is not None for layer in self._layers)
        """Whether any layer has a capacity."""

    def __len__(self) -> int:
        """Forwards that wait to be taken."""
        return len(self._cursors[0]) if self._cursors else 0

    def active(self) -> NDArray[np.bool_]:
        """(L, E): which logical experts of each layer are active: all but in layers of dynamic experts. A host sync."""
        masks = []
        for layer, stack in zip(self._layers, self.stacks, strict=True):
            active_E = getattr(getattr(layer, "router", None), "active_E", None)
            masks.append(np.ones(stack.num_experts, dtype=bool) if active_E is None else active_E.cpu().numpy() > 0)
        return np.stack(masks) if masks else np.ones((0, 0), dtype=bool)

    def take(self) -> list[Forwards]:
        """The forwards since the last call, in order. Raises RuntimeError if layers were not called equally often."""
        by_layer = [cursor.take() for cursor in self._cursors]
        if len({len(forwards) for forwards in by_layer}) > 1:
            raise RuntimeError(
                "some expert layers were called more often than others, so their loads cannot be laid side by side: "
                f"{dict(zip(self.names, map(len, by_layer), strict=True))}"
            )
        by_forward = list(zip(*by_layer, strict=True))
        if by_forward:
            self.row_bytes = [layer.row_bytes for layer in by_forward[-1]]
        groups = itertools.groupby(by_forward, key=lambda forward: tuple(layer.placement for layer in forward))
        return [_stack(placements, list(forwards)) for placements, forwards in groups]


def _stack(placements: tuple[ExpertPlacement, ...], by_forward: list[tuple[RoutedForward, ...]]) -> Forwards:
    load_FLE = torch.stack([torch.stack([layer.load_E for layer in forward]) for forward in by_forward])
    dropped_FLE = torch.zeros_like(load_FLE)
    crossings_FLR = load_FLE.new_zeros(*load_FLE.shape[:2], placements[0].ranks)
    for forward, layers in enumerate(by_forward):
        for index, layer in enumerate(layers):
            if layer.dropped_E is not None:
                dropped_FLE[forward, index] = layer.dropped_E
            if layer.crossings_M is not None:
                crossings_FLR[forward, index, : len(layer.crossings_M)] = layer.crossings_M
    last_choices = [layer.choices for layer in by_forward[-1]]
    return Forwards(placements, load_FLE - dropped_FLE, dropped_FLE, crossings_FLR, last_choices)
