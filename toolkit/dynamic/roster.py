"""The experts that a layer has and had. Every expert has a uid that is never used again, and a logical expert id.

Router, placement and dispatcher use the logical id: row `logical_id` of the router's weight. Logical ids are reused
after an expert was removed; a logical expert without an active expert is inactive. In a layer without
dynamic experts uid and logical id are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Fate = Literal["active", "merged", "pruned"]
EventKind = Literal["grow", "merge", "prune", "kept", "sleep", "undone"]


@dataclass(frozen=True)
class ExpertRecord:
    """One expert, from its creation to its removal."""

    uid: int
    logical_id: int
    """The last one, of an expert that was removed."""
    created_at: int = 0
    """Optimizer steps done when it was created."""
    parent: int | None = None
    """uid of the expert that it was split from."""
    removed_at: int | None = None
    fate: Fate = "active"
    merged_into: int | None = None
    """uid of the expert that it was merged into."""


@dataclass(frozen=True)
class LifecycleEvent:
    """A change of a layer's experts, or a sleep (layer ""); written to lifecycle.jsonl."""

    step: int
    layer: str
    kind: EventKind
    uids: tuple[int, ...]
    """The uids of the experts concerned: new expert and parent, remaining and removed expert of a merge, pruned or kept
    one."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: the reason, and the measurements."""


@dataclass(frozen=True)
class ExpertRoster:
    """All experts of one layer with `logical_experts` logical experts, the removed ones included.

    Immutable: `grow`, `merge` and `prune` return the roster after the event, and raise ValueError for an expert that is
    not active, or a logical expert that is.
    """

    logical_experts: int
    records: tuple[ExpertRecord, ...]
    """All experts by uid: `records[uid]`."""

    @classmethod
    def initial(cls, experts: int, logical_experts: int) -> ExpertRoster:
        """Returns a roster of experts with uids 0, 1, ... and the same logical ids."""
        return cls(logical_experts, tuple(ExpertRecord(uid, uid) for uid in range(experts)))

    @property
    def active(self) -> tuple[ExpertRecord, ...]:
        """The active experts by uid."""
        return tuple(record for record in self.records if record.fate == "active")

    def older_than(self, age: int, step: int) -> tuple[ExpertRecord, ...]:
        """Returns the active experts created at least `age` steps before `step`, by uid."""
        return tuple(record for record in self.active if step - record.created_at >= age)

    def __len__(self) -> int:
        return len(self.active)

    @property
    def uids_of_logical(self) -> tuple[int | None, ...]:
        """Return the uid of each logical expert; None if it is inactive."""
        uid_of = {record.logical_id: record.uid for record in self.active}
        return tuple(uid_of.get(logical_id) for logical_id in range(self.logical_experts))

    @property
    def inactive(self) -> tuple[int, ...]:
        """The inactive logical ids."""
        return tuple(logical_id for logical_id, uid in enumerate(self.uids_of_logical) if uid is None)

    def logical_id_of(self, uid: int) -> int:
        """Returns the logical id of an active expert; raises ValueError for another."""
        if not 0 <= uid < len(self.records) or self.records[uid].fate != "active":
            raise ValueError(f"expert {uid} is not active: {[record.uid for record in self.active]} are")
        return self.records[uid].logical_id

    def grow(self, logical_id: int, *, step: int, parent: int | None = None) -> ExpertRoster:
        """Gives the inactive `logical_id` to a new expert with the next uid."""
        if logical_id not in self.inactive:
            raise ValueError(f"logical expert {logical_id} is not inactive: {list(self.inactive)} are")
        if parent is not None:
            self.logical_id_of(parent)
        created = ExpertRecord(len(self.records), logical_id, created_at=step, parent=parent)
        return replace(self, records=(*self.records, created))

    def merge(self, uid: int, *, into: int, step: int) -> ExpertRoster:
        """Removes expert `uid`, merged into `into`."""
        self.logical_id_of(into)
        return self._remove(uid, removed_at=step, fate="merged", merged_into=into)

    def prune(self, uid: int, *, step: int) -> ExpertRoster:
        return self._remove(uid, removed_at=step, fate="pruned")

    def _remove(self, uid: int, **changes: Any) -> ExpertRoster:
        self.logical_id_of(uid)
        records = list(self.records)
        records[uid] = replace(records[uid], **changes)
        return replace(self, records=tuple(records))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExpertRoster:
        return cls(values["logical_experts"], tuple(ExpertRecord(**record) for record in values["records"]))
