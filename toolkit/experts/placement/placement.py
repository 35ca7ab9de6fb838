"""Placements: a frozen map from logical expert ids to (rank, slot), and the moves between two placements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.errors import UserError, require_choice
from toolkit.experts.placement.placement_options import InitialPlacement

MOST_EXPERTS = 2**20
EMPTY_ROW = -1
"""The id of a row that holds nothing."""


class Place(NamedTuple):
    """One row of one rank's stacked expert weights."""

    rank: int
    slot: int


@dataclass(frozen=True)
class ExpertPlacement:
    """One layer's experts on the ranks of an EP group: `slots[rank][slot]` is an expert id, or `EMPTY_ROW`.

    Ranks may have different numbers of slots, slots may be empty, and an expert may have replicas on several ranks. Ids
    count from 0, and each has at least one slot. Raises ValueError for a map that breaks this.
    """

    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError("a placement needs at least one rank")
        found: set[int] = set()
        for rank, row in enumerate(self.slots):
            ids = set(row)
            ids.discard(EMPTY_ROW)
            if len(ids) + row.count(EMPTY_ROW) < len(row):
                twice = min(e for e, n in Counter(row).items() if n > 1 and e != EMPTY_ROW)
                raise ValueError(f"rank {rank} holds expert {twice} twice: replicas belong on different ranks")
            found |= ids
        if not found:
            raise ValueError("a placement needs at least one expert")
        if min(found) < 0:
            raise ValueError(f"expert id {min(found)} is negative; an empty slot is {EMPTY_ROW}")
        if len(found) != max(found) + 1:
            missing = next(expert for expert in range(max(found)) if expert not in found)
            raise ValueError(f"expert {missing} has no slot, but expert {max(found)} has")

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def slots_per_rank(self) -> list[int]:
        return [len(row) for row in self.slots]

    @cached_property
    def num_experts(self) -> int:
        return 1 + max(e for row in self.slots for e in row)

    @cached_property
    def stride(self) -> int:
        """Slots of the rank that has most: global slot = rank * stride + slot, so that rank = global slot // stride."""
        return max(self.slots_per_rank)

    @cached_property
    def _replicas(self) -> tuple[tuple[Place, ...], ...]:
        replicas: list[list[Place]] = [[] for _ in range(self.num_experts)]
        for rank, row in enumerate(self.slots):
            for slot, expert in enumerate(row):
                if expert != EMPTY_ROW:
                    replicas[expert].append(Place(rank, slot))
        return tuple(tuple(places) for places in replicas)

    def replicas(self, expert: int) -> tuple[Place, ...]:
        """Return the places of `expert`, by rank."""
        return self._replicas[expert]

    def owner(self, expert: int) -> Place:
        """Return the replica that the optimizer updates: the one on the lowest rank."""
        return self._replicas[expert][0]

    def replica_on(self, expert: int, rank: int) -> Place | None:
        """Return the place of `expert` on `rank`, or None."""
        return next((place for place in self._replicas[expert] if place.rank == rank), None)

    @property
    def has_replicas(self) -> bool:
        return any(len(places) > 1 for places in self._replicas)

    @property
    def owner_slots(self) -> tuple[int, ...]:
        """The global slot of each expert's owner."""
        return tuple(rank * self.stride + slot for (rank, slot), *_ in self._replicas)

    def slots_of_experts(self) -> Tensor:
        """Return int64 (E, most replicas), the global slots of each expert's replicas by rank, then `EMPTY_ROW`."""
        width = max(len(places) for places in self._replicas)
        rows = [[rank * self.stride + slot for rank, slot in places] for places in self._replicas]
        return torch.tensor([row + [EMPTY_ROW] * (width - len(row)) for row in rows])

    def num_replicas(self) -> Tensor:
        """Return int64 (E), the number of replicas of each expert."""
        return torch.tensor([len(places) for places in self._replicas])

    def expert_of_slot(self) -> Tensor:
        """Return int64 (ranks, stride), the expert in each slot; `EMPTY_ROW` for an empty or missing slot."""
        return torch.tensor([[*row, *[EMPTY_ROW] * (self.stride - len(row))] for row in self.slots])

    def to_dict(self) -> dict[str, Any]:
        """Return the placement as JSON values."""
        return {"num_experts": self.num_experts, "slots": [list(row) for row in self.slots]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExpertPlacement:
        """Return the placement that `to_dict` wrote. Raises ValueError if the numbers contradict each other."""
        placement = cls(tuple(tuple(int(e) for e in row) for row in data["slots"]))
        if placement.num_experts != data["num_experts"]:
            raise ValueError(f"slots hold {placement.num_experts} experts, not {data['num_experts']}")
        return placement

    def __str__(self) -> str:
        """Return a line per rank, `.` for an empty slot, `'` behind a replica whose owner is elsewhere.

        rank 0 | 0  3  .
        rank 1 | 1  2  3'
        """

        def cell(rank: int, expert: int) -> str:
            if expert == EMPTY_ROW:
                return "."
            return f"{expert}{'' if self.owner(expert).rank == rank else chr(39)}"

        cells = [[cell(rank, expert) for expert in row] for rank, row in enumerate(self.slots)]
        width = max(len(text) for row in cells for text in row)
        digits = len(str(self.ranks - 1))
        return "\n".join(
            f"rank {rank:>{digits}} | {' '.join(text.ljust(width) for text in row)}".rstrip()
            for rank, row in enumerate(cells)
        )


def contiguous(num_experts: int, ranks: int, *, slots_per_rank: int | None = None) -> ExpertPlacement:
    """Return consecutive blocks of experts, the default of most libraries; the first ranks have one more if need be.

    Args:
        num_experts: Number of experts.
        ranks: Ranks of an EP group.
        slots_per_rank: Slots of each rank. Default: the number of experts on the first rank.

    Raises:
        UserError: `num_experts` is larger than `MOST_EXPERTS`, such as in a damaged config.json.
    """
    if num_experts > MOST_EXPERTS:
        raise UserError(f"num_experts={num_experts:,}: more than {MOST_EXPERTS:,} are not supported. Check the config.")
    least, more = divmod(num_experts, ranks)
    slots = least + (more > 0) if slots_per_rank is None else slots_per_rank
    ids = iter(range(num_experts))
    rows = [list(islice(ids, least + (rank < more))) for rank in range(ranks)]
    return _filled(rows, slots)


def initial_placement(
    num_experts: int, ranks: int, kind: InitialPlacement = "contiguous", *, spare_slots: int = 0
) -> ExpertPlacement:
    """Return the placement of experts at the start.

    Args:
        num_experts: Number of experts.
        ranks: Ranks of an EP group.
        kind: "contiguous" blocks of experts, as equal as possible, or "round_robin", expert e on rank e mod `ranks`.
        spare_slots: Further empty slots of each rank.

    Raises:
        UserError: For another `kind`.
    """
    require_choice("placement", kind, InitialPlacement)
    slots = -(-num_experts // ranks) + spare_slots
    if kind == "contiguous":
        return contiguous(num_experts, ranks, slots_per_rank=slots)
    return _filled([list(range(rank, num_experts, ranks)) for rank in range(ranks)], slots)


def _filled(rows: Sequence[Sequence[int]], slots: int) -> ExpertPlacement:
    """Return the placement with these experts on each rank, and empty slots after them."""
    return ExpertPlacement(tuple((*row, *[EMPTY_ROW] * (slots - len(row))) for row in rows))


def with_spare_slots(placement: ExpertPlacement, per_rank: int) -> ExpertPlacement:
    """Return the same experts in the same slots, and `per_rank` empty slots more on each rank."""
    return ExpertPlacement(tuple((*row, *[EMPTY_ROW] * per_rank) for row in placement.slots))


@dataclass(frozen=True)
class Move:
    """The rows of `expert` are copied from one slot to another, of another rank or of the same."""

    expert: int
    source_rank: int
    source_slot: int
    rank: int
    slot: int

    @property
    def travels(self) -> bool:
        """Whether the expert leaves its rank."""
        return self.source_rank != self.rank


def moves(old: ExpertPlacement, new: ExpertPlacement) -> list[Move]:
    """Return the rows to copy to get from `old` to `new`, by destination; none for replicas that stay in their slot.

    A rank that has a replica copies from itself, any other from the owner. Experts that are not in `old` have nothing
    to copy.
    """
    found = []
    for rank, (row, before) in enumerate(zip(new.slots, old.slots, strict=True)):
        for slot, expert in enumerate(row):
            if expert == EMPTY_ROW or expert >= old.num_experts or before[slot : slot + 1] == (expert,):
                continue
            source = old.replica_on(expert, rank) or old.owner(expert)
            found.append(Move(expert, *source, rank, slot))
    return found


def owner_moves(old: ExpertPlacement, new: ExpertPlacement) -> list[Move]:
    """Return the moves of rows that only owners have, such as optimizer rows: from owner to owner.

    Not a subset of `moves`: a rank whose weights stay in their slot can become the owner.
    """
    known = range(min(old.num_experts, new.num_experts))
    return [Move(e, *old.owner(e), *new.owner(e)) for e in known if old.owner(e) != new.owner(e)]
