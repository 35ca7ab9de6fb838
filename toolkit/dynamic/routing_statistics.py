"""Counts which classes of samples each expert gets, and which are chosen together, by uid; read once an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit.experts.layer.moe_layer import moe_layers
from toolkit.experts.layer.routing_log import Choices, ForwardCursor
from toolkit.experts.parallel.collectives import sum_over_ranks

if TYPE_CHECKING:
    from jaxtyping import Int

MOST_ASSIGNMENTS = 2**18
"""(Token, expert) pairs of a layer that are kept (8 bytes each) before they are counted."""
Ids = tuple[int | None, ...]
"""The uid of each logical expert; None for inactive ones."""


@dataclass(frozen=True)
class RoutingCounts:
    """Counts of one layer over a period, by uid."""

    ids: tuple[int, ...]
    together_EE: NDArray[np.int64]
    """Tokens that chose both experts; the diagonal holds the tokens that chose the expert at all."""
    classes_EC: NDArray[np.int64]
    """Tokens of each class."""

    @classmethod
    def none(cls, classes: int) -> RoutingCounts:
        return cls((), np.zeros((0, 0), dtype=np.int64), np.zeros((0, classes), dtype=np.int64))

    @classmethod
    def of_logical_ids(cls, ids: Ids, together_EE: NDArray[np.int64], classes_EC: NDArray[np.int64]) -> RoutingCounts:
        """Returns counts by uid from counts by logical expert, whose uids are `ids`. Inactive ones have no tokens."""
        logical_ids = [logical_id for logical_id, id in enumerate(ids) if id is not None]
        active = tuple(id for id in ids if id is not None)
        return cls(active, together_EE[np.ix_(logical_ids, logical_ids)], classes_EC[logical_ids])

    def __add__(self, other: RoutingCounts) -> RoutingCounts:
        ids = tuple(sorted({*self.ids, *other.ids}))
        place = {id: e for e, id in enumerate(ids)}
        together = np.zeros((len(ids), len(ids)), dtype=np.int64)
        classes = np.zeros((len(ids), self.classes_EC.shape[1]), dtype=np.int64)
        for part in (self, other):
            rows = [place[id] for id in part.ids]
            together[np.ix_(rows, rows)] += part.together_EE
            classes[rows] += part.classes_EC
        return RoutingCounts(ids, together, classes)

    def to_dict(self) -> dict[str, Any]:
        return {"ids": list(self.ids), "together": self.together_EE.tolist(), "classes": self.classes_EC.tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], classes: int) -> RoutingCounts:
        ids = tuple(values["ids"])
        together = np.array(values["together"], dtype=np.int64).reshape(len(ids), len(ids))
        return cls(ids, together, np.array(values["classes"], dtype=np.int64).reshape(len(ids), classes))


class _Note(NamedTuple):
    ids: Ids
    choices: Choices
    labels: Tensor | None


class RoutingStatistics:
    """Reader of the routing logs of `MoE` layers between `begin_step` and `end_step`, one forward per micro-batch.

    Tensors stay on the device until `take`. `uids_of_logical` is called at the start of each step, so counts follow the
    uid if a logical expert is reused. Training forward passes after the micro-batches, such as in a replay, are not
    counted.
    """

    def __init__(self, model: nn.Module, *, num_classes: int, uids_of_logical: Callable[[str], Ids]):
        self.layers = moe_layers(model)
        self.num_classes, self.uids_of_logical = num_classes, uids_of_logical
        self._cursors: dict[str, ForwardCursor] = {}
        """The readers of the step that is running."""
        self._uids: dict[str, Ids] = {}
        self._labels: dict[str, Iterator[Tensor | None]] = {}
        self._forget()
        self._total = self._nothing()

    def begin_step(self, labels: Iterable[Tensor | None]) -> None:
        """`labels`: the class of each sample, one tensor per micro-batch of the coming step; None if it has none."""
        self.end_step()
        of_step = list(labels)
        self._cursors = {name: layer.expert_stack.log.follow(choices=True) for name, layer in self.layers.items()}
        self._uids = {name: self.uids_of_logical(name) for name in self.layers}
        self._labels = {name: iter(of_step) for name in self.layers}

    def end_step(self) -> None:
        self._read()
        self._cursors = {}

    def _read(self) -> None:
        """Takes the forwards of this step so far."""
        for name, cursor in self._cursors.items():
            notes = self._notes[name]
            # Forwards first, or `zip` would take a label before it finds that no forward is left.
            for forward, labels in zip(cursor.take(), self._labels[name], strict=False):
                assert forward.choices is not None
                notes.append(_Note(self._uids[name], forward.choices, labels))
                self._waiting[name] += forward.choices.expert_ids_TK.numel()
            if self._waiting[name] >= MOST_ASSIGNMENTS:
                self._fold(name)

    def _fold(self, name: str) -> None:
        """Adds the waiting forwards to the sums on the device: one table (E, E + C) per tuple of uids."""
        notes, self._notes[name], self._waiting[name] = self._notes[name], [], 0
        logical_experts = len(self.layers[name].load_E)
        classes = self.num_classes
        for ids, group in itertools.groupby(notes, key=lambda note: note.ids):
            forwards = list(group)
            pairs_EE = count_pairs([note.choices for note in forwards], logical_experts)
            experts_TK = torch.cat([note.choices.expert_ids_TK for note in forwards])
            kept_TK = torch.cat([note.choices.counted() for note in forwards]).long()
            labels_T = torch.cat([_labels(note, classes) for note in forwards])
            # Tokens without a class go into an extra column, which is cut off.
            cells = experts_TK * (classes + 1) + labels_T[:, None]
            seen = pairs_EE.new_zeros(logical_experts * (classes + 1)).scatter_add_(
                0, cells.flatten(), kept_TK.flatten()
            )
            table = torch.cat([pairs_EE, seen.view(logical_experts, -1)[:, :classes]], dim=1)
            before = self._sums[name].get(ids)
            self._sums[name][ids] = table if before is None else before + table

    def _forget(self) -> None:
        self._notes: dict[str, list[_Note]] = {name: [] for name in self.layers}
        self._waiting = dict.fromkeys(self.layers, 0)
        """Assignments in `_notes`."""
        self._sums: dict[str, dict[Ids, Tensor]] = {name: {} for name in self.layers}

    def _collect(self) -> None:
        """Brings the sums of all ranks to the host. A collective, one reduction: uids are the same on all ranks."""
        self._read()
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
                counts = part.view(table.shape).numpy()
                logical_experts = len(ids)
                self._total[name] += RoutingCounts.of_logical_ids(
                    ids, counts[:, :logical_experts], counts[:, logical_experts:]
                )
            sums.clear()

    def take(self) -> dict[str, RoutingCounts]:
        """Returns the counts of all ranks since the last call, by layer; ends the step. A collective."""
        self.end_step()
        self._collect()
        total, self._total = self._total, self._nothing()
        return total

    def _nothing(self) -> dict[str, RoutingCounts]:
        return {name: RoutingCounts.none(self.num_classes) for name in self.layers}

    def state_dict(self) -> dict[str, Any]:
        """A collective."""
        self._collect()
        return {name: counts.to_dict() for name, counts in self._total.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forget()
        self._total = {name: RoutingCounts.from_dict(state[name], self.num_classes) for name in self.layers}


def _labels(note: _Note, classes: int) -> Tensor:
    """Return (T), the class of each token's sample; `classes` for none."""
    tokens = len(note.choices.expert_ids_TK)
    if note.labels is None:
        return note.choices.expert_ids_TK.new_full((tokens,), classes)
    labels = note.labels.flatten()
    return labels if len(labels) == tokens else labels.repeat_interleave(tokens // max(1, len(labels)))


def count_pairs(choices: Sequence[Choices], num_experts: int) -> Int[Tensor, "E E"]:
    """Return int64 (E, E), how many tokens chose both experts; the diagonal holds the tokens that chose the expert at
    all."""
    ids_TK = torch.cat([part.expert_ids_TK for part in choices])
    counted_TK = torch.cat([part.counted() for part in choices]).long()
    cells_TKK = ids_TK[:, :, None] * num_experts + ids_TK[:, None, :]
    both_TKK = counted_TK[:, :, None] * counted_TK[:, None, :]
    pairs = ids_TK.new_zeros(num_experts * num_experts).scatter_add_(0, cells_TKK.flatten(), both_TKK.flatten())
    return pairs.view(num_experts, num_experts)
