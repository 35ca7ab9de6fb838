"""Who lives in a layer: experts have ids that never return, and sit on seats whose number never changes.

A seat is what the router, the placement and the dispatcher count: row `logical_id` of the router's weight, and the rows that
the placement calls expert `logical_id`. In a layer without a lifecycle every expert sits on the seat of its own id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Fate = Literal["active", "merged", "pruned"]
EventKind = Literal["grow", "merge", "prune", "sleep", "undone"]


@dataclass(frozen=True)
class ExpertRecord:
    """One expert, from its birth to its end."""

    id: int
    logical_id: int
    """Where it sits, or sat."""
    created_at: int = 0
    """Optimizer steps before its birth."""
    parent: int | None = None
    """The expert whose tokens it took over half of."""
    removed_at: int | None = None
    fate: Fate = "active"
    merged_into: int | None = None
    """The expert that it was merged into."""


@dataclass(frozen=True)
class LifecycleEvent:
    """Something that happened to a population, for people and for the knowledge graph."""

    step: int
    layer: str
    kind: EventKind
    ids: tuple[int, ...]
    """The experts concerned: of a growth the new one, of a merger the heir and then who ended."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: why, and what was measured."""


@dataclass(frozen=True)
class ExpertRoster:
    """The experts of one layer, alive and gone, on `logical_experts` seats.

    Immutable: `grow`, `merge` and `prune` return the population after the event. They raise ValueError where it cannot
    happen.
    """

    logical_experts: int
    records: tuple[ExpertRecord, ...]
    """By id: `records[id]`."""

    @classmethod
    def initial(cls, experts: int, logical_experts: int, sitting: tuple[int, ...] | None = None) -> ExpertRoster:
        """Experts 0, 1, ... on the first seats, or on those of `sitting`."""
        sitting = sitting or tuple(range(experts))
        return cls(logical_experts, tuple(ExpertRecord(id, logical_id) for id, logical_id in enumerate(sitting)))

    def __post_init__(self) -> None:
        taken = [record.logical_id for record in self.active]
        if len(set(taken)) < len(taken):
            raise ValueError(f"two living experts on one seat: {sorted(taken)}")
        if not all(0 <= logical_id < self.logical_experts for logical_id in taken):
            raise ValueError(f"seats {taken} of a layer that has {self.logical_experts}")
        if [record.id for record in self.records] != list(range(len(self.records))):
            raise ValueError("members are listed by id, and ids count from 0")

    @property
    def active(self) -> tuple[ExpertRecord, ...]:
        """By id."""
        return tuple(record for record in self.records if record.fate == "active")

    def older_than(self, age: int, step: int) -> tuple[ExpertRecord, ...]:
        """The living that are at least `age` steps old at `step`, by id."""
        return tuple(record for record in self.active if step - record.created_at >= age)

    def __len__(self) -> int:
        return len(self.active)

    @property
    def uid_at(self) -> tuple[int | None, ...]:
        """The living expert on each seat; None where it is vacant."""
        ids: list[int | None] = [None] * self.logical_experts
        for record in self.active:
            ids[record.logical_id] = record.id
        return tuple(ids)

    @property
    def vacant(self) -> tuple[int, ...]:
        return tuple(logical_id for logical_id, id in enumerate(self.uid_at) if id is None)

    def logical_id_of(self, id: int) -> int:
        """Raises ValueError for an expert that does not live."""
        if not 0 <= id < len(self.records) or self.records[id].fate != "active":
            raise ValueError(f"expert {id} does not live: {[record.id for record in self.active]} do")
        return self.records[id].logical_id

    def grow(self, logical_id: int, *, step: int, parent: int | None = None) -> ExpertRoster:
        """The next id sits down on `logical_id`."""
        if logical_id not in self.vacant:
            raise ValueError(f"seat {logical_id} is not vacant: {list(self.vacant)} are")
        if parent is not None:
            self.logical_id_of(parent)
        return replace(
            self, records=(*self.records, ExpertRecord(len(self.records), logical_id, created_at=step, parent=parent))
        )

    def merge(self, id: int, *, into: int, step: int) -> ExpertRoster:
        """Expert `id` ends in `into`."""
        if id == into:
            raise ValueError(f"expert {id} cannot be merged into itself")
        self.logical_id_of(into)
        return self._end(id, removed_at=step, fate="merged", merged_into=into)

    def prune(self, id: int, *, step: int) -> ExpertRoster:
        return self._end(id, removed_at=step, fate="pruned")

    def _end(self, id: int, **changes: Any) -> ExpertRoster:
        self.logical_id_of(id)
        if len(self) == 1:
            raise ValueError(f"expert {id} is the last one")
        records = list(self.records)
        records[id] = replace(records[id], **changes)
        return replace(self, records=tuple(records))

    def to_dict(self) -> dict[str, Any]:
        return {"logical_experts": self.logical_experts, "records": [asdict(record) for record in self.records]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExpertRoster:
        return cls(values["logical_experts"], tuple(ExpertRecord(**record) for record in values["records"]))
