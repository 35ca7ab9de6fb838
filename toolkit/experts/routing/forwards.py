"""The training forwards of a model, all expert layers side by side.

E is the largest number of experts of any layer; others have zeros after theirs.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.layer.routing_log import RoutedForward, RowBytes
from toolkit.experts.placement.placement import ExpertPlacement


class Forwards(NamedTuple):
    """Consecutive forwards under the same placements; counts of this rank, on the device."""

    placements: tuple[ExpertPlacement, ...]
    """One per layer."""
    sent_FLE: Tensor
    """int64: assignments that were sent to experts."""
    dropped_FLE: Tensor
    """int64: assignments that a capacity dropped."""
    visits_FLR: Tensor
    """int64: tokens that have experts on each rank of the EP group; 0 for a group of one rank."""
    crossings_FLR: Tensor
    """int64: distinct tokens sent to each other node, numbered within the EP group; one entry per rank, 0 if
    `ExpertStack.count_crossings` was not called."""


class ModelForwards:
    """Reads the routing logs of all layers of `experts`, from now on."""

    def __init__(self, experts: Experts):
        self.experts = experts
        self.names = [name or "moe" for name in experts.stacks]
        self.stacks = list(experts.stacks.values())
        self.row_bytes = [RowBytes(0, 0)] * len(self.stacks)
        """The bytes of rows in the last forward that was taken, per layer."""
        self._cursors = [stack.log.follow() for stack in self.stacks]
        self.may_drop = any(getattr(layer, "capacity_factor", None) is not None for layer in experts.layers.values())
        """Whether any layer has a capacity."""

    def __len__(self) -> int:
        """Forwards that wait to be taken."""
        return max(map(len, self._cursors), default=0)

    def active(self) -> NDArray[np.bool_]:
        """Return (L, E), which logical experts of each layer are active: all but in layers of dynamic experts. A host
        sync."""
        active_LE = np.zeros((len(self.stacks), self.num_experts), dtype=bool)
        for index, (name, stack) in enumerate(self.experts.stacks.items()):
            active_LE[index, : stack.num_experts] = self.experts.active(name).numpy()
        return active_LE

    @property
    def num_experts(self) -> int:
        """The largest number of experts of any layer; 0 without layers."""
        return max((stack.num_experts for stack in self.stacks), default=0)

    def take(self, *, fill: bool = False) -> list[Forwards]:
        """Return the forwards since the last call, in order.

        Args:
            fill: Whether layers that were called less often than others get calls without tokens at the end.

        Raises:
            UserError: If layers were called less often than others and `fill` is False.
        """
        by_layer = [cursor.take() for cursor in self._cursors]
        calls = [len(forwards) for forwards in by_layer]
        if len(set(calls)) > 1 and not fill:
            raise UserError(
                "model: some layers were called more often than others, "
                f"{dict(zip(self.names, calls, strict=True))}. Record a model that calls each layer once."
            )
        for forwards, stack in zip(by_layer, self.stacks, strict=True):
            no_load_E = torch.zeros_like(stack.log.load_E)
            none = RoutedForward(stack.placement, no_load_E, None, None, None, RowBytes(0, 0), None)
            forwards += [none] * (max(calls) - len(forwards))
        by_forward = list(zip(*by_layer, strict=True))
        for index, called in enumerate(calls):
            if called:
                self.row_bytes[index] = by_layer[index][called - 1].row_bytes
        groups = itertools.groupby(by_forward, key=lambda forward: tuple(layer.placement for layer in forward))
        return [_stack(placements, list(forwards)) for placements, forwards in groups]


def _stack(placements: tuple[ExpertPlacement, ...], by_forward: list[tuple[RoutedForward, ...]]) -> Forwards:
    # The load of a layer that was never called is still on the CPU.
    devices = [layer.load_E.device for layer in by_forward[0]]
    device = next((each for each in devices if each.type != "cpu"), devices[0])
    loads = [[layer.load_E.to(device) for layer in forward] for forward in by_forward]
    load_FLE = torch.stack([pad_sequence(forward, batch_first=True) for forward in loads])
    dropped_FLE = torch.zeros_like(load_FLE)
    visits_FLR = load_FLE.new_zeros(*load_FLE.shape[:2], placements[0].ranks)
    crossings_FLR = torch.zeros_like(visits_FLR)
    for forward, layers in enumerate(by_forward):
        for index, layer in enumerate(layers):
            if layer.dropped_E is not None:
                dropped_FLE[forward, index, : len(layer.dropped_E)] = layer.dropped_E
            if layer.visits_P is not None:
                visits_FLR[forward, index] = layer.visits_P
            if layer.crossings_G is not None:
                crossings_FLR[forward, index, : len(layer.crossings_G)] = layer.crossings_G
    return Forwards(placements, load_FLE - dropped_FLE, dropped_FLE, visits_FLR, crossings_FLR)
