"""Who lives in a layer: experts have ids that never return, and sit on seats whose number never changes.

A seat is what the router, the placement and the dispatcher count: row `seat` of the router's weight, and the rows that
the placement calls expert `seat`. In a layer without a lifecycle every expert sits on the seat of its own id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Fate = Literal["alive", "merged", "pruned"]
EventKind = Literal["grow", "merge", "prune", "sleep", "undone"]


@dataclass(frozen=True)
class Member:
    """One expert, from its birth to its end."""

    id: int
    seat: int
    """Where it sits, or sat."""
    born: int = 0
    """Optimizer steps before its birth."""
    parent: int | None = None
    """The expert whose tokens it took over half of."""
    died: int | None = None
    fate: Fate = "alive"
    heir: int | None = None
    """The expert that it was merged into."""


@dataclass(frozen=True)
class LifeEvent:
    """Something that happened to a population, for people and for the knowledge graph."""

    step: int
    layer: str
    kind: EventKind
    ids: tuple[int, ...]
    """The experts concerned: of a growth the new one, of a merger the heir and then who ended."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: why, and what was measured."""


@dataclass(frozen=True)
class Population:
    """The experts of one layer, alive and gone, on `seats` seats.

    Immutable: `grow`, `merge` and `prune` return the population after the event. They raise ValueError where it cannot
    happen.
    """

    seats: int
    members: tuple[Member, ...]
    """By id: `members[id]`."""

    @classmethod
    def initial(cls, experts: int, seats: int, sitting: tuple[int, ...] | None = None) -> Population:
        """Experts 0, 1, ... on the first seats, or on those of `sitting`."""
        sitting = sitting or tuple(range(experts))
        return cls(seats, tuple(Member(id, seat) for id, seat in enumerate(sitting)))

    def __post_init__(self) -> None:
        taken = [member.seat for member in self.living]
        if len(set(taken)) < len(taken):
            raise ValueError(f"two living experts on one seat: {sorted(taken)}")
        if not all(0 <= seat < self.seats for seat in taken):
            raise ValueError(f"seats {taken} of a layer that has {self.seats}")
        if [member.id for member in self.members] != list(range(len(self.members))):
            raise ValueError("members are listed by id, and ids count from 0")

    @property
    def living(self) -> tuple[Member, ...]:
        """By id."""
        return tuple(member for member in self.members if member.fate == "alive")

    def older_than(self, age: int, step: int) -> tuple[Member, ...]:
        """The living that are at least `age` steps old at `step`, by id."""
        return tuple(member for member in self.living if step - member.born >= age)

    def __len__(self) -> int:
        return len(self.living)

    @property
    def id_on_seat(self) -> tuple[int | None, ...]:
        """The living expert on each seat; None where it is vacant."""
        ids: list[int | None] = [None] * self.seats
        for member in self.living:
            ids[member.seat] = member.id
        return tuple(ids)

    @property
    def vacant(self) -> tuple[int, ...]:
        return tuple(seat for seat, id in enumerate(self.id_on_seat) if id is None)

    def seat_of(self, id: int) -> int:
        """Raises ValueError for an expert that does not live."""
        if not 0 <= id < len(self.members) or self.members[id].fate != "alive":
            raise ValueError(f"expert {id} does not live: {[member.id for member in self.living]} do")
        return self.members[id].seat

    def grow(self, seat: int, *, step: int, parent: int | None = None) -> Population:
        """The next id sits down on `seat`."""
        if seat not in self.vacant:
            raise ValueError(f"seat {seat} is not vacant: {list(self.vacant)} are")
        if parent is not None:
            self.seat_of(parent)
        return replace(self, members=(*self.members, Member(len(self.members), seat, born=step, parent=parent)))

    def merge(self, id: int, *, into: int, step: int) -> Population:
        """Expert `id` ends in `into`."""
        if id == into:
            raise ValueError(f"expert {id} cannot be merged into itself")
        self.seat_of(into)
        return self._end(id, died=step, fate="merged", heir=into)

    def prune(self, id: int, *, step: int) -> Population:
        return self._end(id, died=step, fate="pruned")

    def _end(self, id: int, **changes: Any) -> Population:
        self.seat_of(id)
        if len(self) == 1:
            raise ValueError(f"expert {id} is the last one")
        members = list(self.members)
        members[id] = replace(members[id], **changes)
        return replace(self, members=tuple(members))

    def to_dict(self) -> dict[str, Any]:
        return {"seats": self.seats, "members": [asdict(member) for member in self.members]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Population:
        return cls(values["seats"], tuple(Member(**member) for member in values["members"]))
