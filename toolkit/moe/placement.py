"""Where each expert lives: a frozen map from stable expert ids to (rank, slot)."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import UserError


@dataclass(frozen=True)
class ExpertPlacement:
    """`slot_of_expert[e]` counts slots through all ranks of a shard group: rank r has slots r * slots to (r+1) * slots - 1."""

    slot_of_expert: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        if len(set(self.slot_of_expert)) != len(self.slot_of_expert):
            raise ValueError(f"two experts share a slot in {self.slot_of_expert}")
        if len(self.slot_of_expert) % self.ranks or set(self.slot_of_expert) != set(range(len(self.slot_of_expert))):
            raise ValueError(f"slots {self.slot_of_expert} do not fill {self.ranks} rank(s) evenly")

    @property
    def slots(self) -> int:
        """Slots per rank."""
        return len(self.slot_of_expert) // self.ranks

    def rank_of(self, expert_id: int) -> int:
        return self.slot_of_expert[expert_id] // self.slots

    def experts_on(self, rank: int) -> list[int]:
        """The expert ids of `rank`, in slot order."""
        by_slot = sorted(range(len(self.slot_of_expert)), key=self.slot_of_expert.__getitem__)
        return by_slot[rank * self.slots : (rank + 1) * self.slots]


def contiguous(num_experts: int, ranks: int) -> ExpertPlacement:
    """Equal consecutive blocks: what every mainstream library does, and our starting point.

    Raises UserError when the experts cannot be dealt out equally.
    """
    if num_experts % ranks:
        fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise UserError(
            f"--experts {num_experts} cannot be spread equally over --ep-size {ranks}: "
            f"use an expert parallel size out of {fitting}, or a multiple of {ranks} experts."
        )
    return ExpertPlacement(tuple(range(num_experts)), ranks)
