"""Which experts saw which class, and which of them together: counted on the device, asked for once an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit.moe.layer import MoE, moe_layers
from toolkit.parallel.groups import sum_over_ranks

MOST_WAITING = 256
"""Forwards of a layer that are kept before they are counted."""
Ids = tuple[int | None, ...]
"""The expert on each seat; None where it is vacant."""


@dataclass(frozen=True)
class Counts:
    """Of one layer over a period, by expert id."""

    ids: tuple[int, ...]
    together_EE: NDArray[np.int64]
    """Tokens that chose both; the diagonal holds the tokens that chose the expert at all."""
    classes_EC: NDArray[np.int64]
    """Tokens of each class."""

    @classmethod
    def none(cls, classes: int) -> Counts:
        return cls((), np.zeros((0, 0), dtype=np.int64), np.zeros((0, classes), dtype=np.int64))

    @classmethod
    def of_logical_ids(cls, ids: Ids, together_SS: NDArray[np.int64], classes_SC: NDArray[np.int64]) -> Counts:
        """Counts by seat, under the ids that sat there. A vacant seat is chosen by nobody."""
        logical_ids = [logical_id for logical_id, id in enumerate(ids) if id is not None]
        sitting = tuple(id for id in ids if id is not None)
        return cls(sitting, together_SS[np.ix_(logical_ids, logical_ids)], classes_SC[logical_ids])

    def __add__(self, other: Counts) -> Counts:
        ids = tuple(sorted({*self.ids, *other.ids}))
        place = {id: e for e, id in enumerate(ids)}
        together = np.zeros((len(ids), len(ids)), dtype=np.int64)
        classes = np.zeros((len(ids), self.classes_EC.shape[1]), dtype=np.int64)
        for part in (self, other):
            rows = [place[id] for id in part.ids]
            together[np.ix_(rows, rows)] += part.together_EE
            classes[rows] += part.classes_EC
        return Counts(ids, together, classes)

    def to_dict(self) -> dict[str, Any]:
        return {"ids": list(self.ids), "together": self.together_EE.tolist(), "classes": self.classes_EC.tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], classes: int) -> Counts:
        ids = tuple(values["ids"])
        together = np.array(values["together"], dtype=np.int64).reshape(len(ids), len(ids))
        return cls(ids, together, np.array(values["classes"], dtype=np.int64).reshape(len(ids), classes))


class _Note(NamedTuple):
    ids: Ids
    experts_TK: Tensor
    kept_TK: Tensor | None
    labels: Tensor | None


class RoutingStatistics:
    """Listens to the training forwards of a model's `MoE` layers between `begin_step` and `end_step`.

    A forward only leaves references behind; tensors are added up every `MOST_WAITING` forwards, and reach the host in
    `take`. What sits on a layer's seats is asked of `uids_of_logical` at every forward, so counts follow ids when a seat
    gets another expert. Forwards without gradients or without a micro-batch of their own, such as a sleep's, are not
    counted, nor are those that a recomputation repeats.
    """

    def __init__(self, model: nn.Module, *, num_classes: int, uids_of_logical: Callable[[str], Ids]):
        self.layers = moe_layers(model)
        self.num_classes, self.uids_of_logical = num_classes, uids_of_logical
        self._labels: Sequence[Tensor | None] = ()
        self._forwards = dict.fromkeys(self.layers, 0)
        self._seen = {name: layer.load_E for name, layer in self.layers.items()}
        self._notes: dict[str, list[_Note]] = {name: [] for name in self.layers}
        self._sums: dict[str, dict[Ids, Tensor]] = {name: {} for name in self.layers}
        self._total = self._nothing()
        for name, layer in self.layers.items():
            layer.register_forward_hook(partial(self._note, name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Whoever copies a model copies its hooks; what a copy does between our steps is not counted."""
        return self

    def begin_step(self, labels: Iterable[Tensor | None]) -> None:
        """The class of each sample of the coming step's micro-batches, one tensor each; None where there are none."""
        self._labels = list(labels)
        self._forwards = dict.fromkeys(self.layers, 0)

    def end_step(self) -> None:
        self._labels = ()

    def _note(self, name: str, layer: MoE, inputs: Any, output: Any) -> None:  # noqa: ARG002
        if layer.load_E is self._seen[name]:
            return
        self._seen[name] = layer.load_E
        place = self._forwards[name]
        self._forwards[name] += 1
        if place >= len(self._labels) or layer.routing is None:
            return
        routing, notes = layer.routing, self._notes[name]
        notes.append(_Note(self.uids_of_logical(name), routing.expert_ids_TK, routing.kept_TK, self._labels[place]))
        if len(notes) >= MOST_WAITING:
            self._fold(name)

    def _fold(self, name: str) -> None:
        """Add what waits to the sums on the device, one (S, S + C) table for each seating."""
        notes, self._notes[name] = self._notes[name], []
        logical_experts, classes = len(self.layers[name].load_E), self.num_classes
        for ids, group in itertools.groupby(notes, key=lambda note: note.ids):
            forwards = list(group)
            experts_TK = torch.cat([note.experts_TK for note in forwards])
            kept_TK = torch.cat([_kept(note) for note in forwards]).long()
            pairs = experts_TK[:, :, None] * logical_experts + experts_TK[:, None, :]
            both = kept_TK[:, :, None] * kept_TK[:, None, :]
            zeros = experts_TK.new_zeros
            together = zeros(logical_experts * logical_experts).scatter_add_(0, pairs.flatten(), both.flatten())
            labels_T = torch.cat([_labels(note, classes) for note in forwards])
            # Tokens without a class are counted in a column that is cut off.
            cells = experts_TK * (classes + 1) + labels_T[:, None]
            seen = zeros(logical_experts * (classes + 1)).scatter_add_(0, cells.flatten(), kept_TK.flatten())
            table = torch.cat(
                [together.view(logical_experts, logical_experts), seen.view(logical_experts, -1)[:, :classes]], dim=1
            )
            before = self._sums[name].get(ids)
            self._sums[name][ids] = table if before is None else before + table

    def _collect(self) -> None:
        """Bring the sums of all ranks to the host. A collective, one reduction: seatings are alike on all ranks."""
        for name in self.layers:
            self._fold(name)
        tables = [table for sums in self._sums.values() for table in sums.values()]
        if not tables:
            return
        flat = sum_over_ranks(torch.cat([table.flatten() for table in tables]))
        host = flat.cpu().split([table.numel() for table in tables])
        found = iter(zip(host, tables, strict=True))
        for name, sums in self._sums.items():
            for ids in sums:
                part, table = next(found)
                counts, logical_experts = part.view(table.shape).numpy(), len(ids)
                self._total[name] += Counts.of_logical_ids(
                    ids, counts[:, :logical_experts], counts[:, logical_experts:]
                )
            sums.clear()

    def take(self) -> dict[str, Counts]:
        """The counts of all ranks since the last time, by layer. A collective."""
        self._collect()
        total, self._total = self._total, self._nothing()
        return total

    def _nothing(self) -> dict[str, Counts]:
        return {name: Counts.none(self.num_classes) for name in self.layers}

    def state_dict(self) -> dict[str, Any]:
        """A collective."""
        self._collect()
        return {name: counts.to_dict() for name, counts in self._total.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._notes = {name: [] for name in self.layers}
        self._sums = {name: {} for name in self.layers}
        self._total = {name: Counts.from_dict(state[name], self.num_classes) for name in self.layers}


def _kept(note: _Note) -> Tensor:
    return torch.ones_like(note.experts_TK, dtype=torch.bool) if note.kept_TK is None else note.kept_TK


def _labels(note: _Note, classes: int) -> Tensor:
    """(T): the class of each token, `classes` where it has none. The tokens of a sample share its class."""
    tokens = len(note.experts_TK)
    if note.labels is None:
        return note.experts_TK.new_full((tokens,), classes)
    labels = note.labels.flatten()
    return labels if len(labels) == tokens else labels.repeat_interleave(tokens // max(1, len(labels)))
