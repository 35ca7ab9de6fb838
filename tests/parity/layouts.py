"""How a model is laid out over ranks, by name: EP groups, placement, replicas, moves, and sharding of the rest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal
from unittest import mock

import torch

from tests.support.placements import by_slot
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.loads import Load
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import replicate


def rotate(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:  # noqa: ARG001
    """Plan a move of every expert to the next rank."""
    return ExpertPlacement((*current.slots[1:], current.slots[0]))


@dataclass(frozen=True)
class Layout:
    """A layout of `world` ranks."""

    world: int
    ep_size: int
    placement: str = "contiguous"
    """See `place`."""
    resumed: str = "shuffled"
    """The placement with which a run goes on after its checkpoint."""
    spare_slots: int = 0
    planner: Literal["rotate", "replicate"] | None = None
    """Planner that moves experts after each step."""
    dense: Literal["ddp", "fsdp2"] = "ddp"
    fsdp_size: int | None = None
    ranks: Literal["neighbours", "strided", "crossed"] = "neighbours"
    """The ranks of an EP group: consecutive, as far apart as possible, or first with last and so on inwards."""
    nodes: int = 1

    def groups(self) -> ExpertGroups:
        if self.ranks == "crossed":
            return make_expert_groups(ranks=[[rank, self.world - 1 - rank] for rank in range(self.world // 2)])
        stride = self.world // self.ep_size if self.ranks == "strided" else 1
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(self.world // self.nodes)):
            exchange = "hierarchical" if self.nodes > 1 else "flat"
            return make_expert_groups(self.ep_size, ep_stride=stride, exchange=exchange)

    @property
    def replan(self) -> ReplanOptions | None:
        if self.planner is None:
            return None
        return ReplanOptions(planner={"rotate": rotate, "replicate": replicate}[self.planner], every=1, guarded=False)


LAYOUTS = {
    "1 process": Layout(1, 1, spare_slots=2),
    "replicated experts": Layout(2, 1, resumed="contiguous"),
    "EP 2": Layout(2, 2, "uneven"),
    "EP 2, replicas": Layout(2, 2, "replicas", spare_slots=1),
    "EP 2, moves": Layout(2, 2, planner="rotate"),
    "EP 2, moves, FSDP2": Layout(2, 2, "shuffled", "contiguous", planner="rotate", dense="fsdp2"),
    "EP 2 of 4, crossed": Layout(4, 2, "replicas", "contiguous", ranks="crossed"),
    "EP 2 x shards 2": Layout(4, 2, "replicas", ranks="strided", dense="fsdp2"),
}
"""Layouts that are combined with each model, loop, optimizer and habit. "moves": each expert moves after each step."""

MORE_LAYOUTS = {
    "EP 2, one rank": Layout(2, 2, "one rank"),
    "EP 4, moving replicas": Layout(4, 4, spare_slots=1, planner="replicate"),
    "EP 4, 2 nodes": Layout(4, 4, "uneven", nodes=2),
    "shards 2": Layout(2, 1, resumed="contiguous", dense="fsdp2"),
    "EP 2 of 4, moves, HSDP": Layout(4, 2, "shuffled", planner="rotate", dense="fsdp2", fsdp_size=2),
    "EP 2 x shards 2, HSDP": Layout(4, 2, "replicas", ranks="strided", dense="fsdp2", fsdp_size=2),
    "EP 2 x shards 2, moves": Layout(4, 2, "shuffled", planner="rotate", dense="fsdp2"),
    "EP 2 x shards 2 x replicas 2": Layout(8, 2, "shuffled", planner="rotate", dense="fsdp2", fsdp_size=4),
    "EP 4 x shards 2": Layout(8, 4, "replicas", dense="fsdp2"),
    "EP 4 of 8, 4 nodes": Layout(8, 4, "replicas", ranks="strided", nodes=4),
}
"""Layouts of single cases."""


def place(name: str, experts: int, ranks: int) -> ExpertPlacement:
    """Return a placement by name.

    "spare": two empty slots per rank. "one rank": all on rank 0. "shuffled": equal counts in any order. "uneven": one
    more than half on rank 0.
    "replicas": experts 0 and 1 on every rank, an empty slot per rank, and the last expert owned by rank 0.
    """
    if name == "spare":
        return with_spare_slots(contiguous(experts, ranks), 2)
    if name == "contiguous" or ranks == 1:
        return contiguous(experts, ranks)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(3)).tolist()
    if name == "one rank":
        return ExpertPlacement((tuple(order), *[()] * (ranks - 1)))
    if name == "shuffled":
        return by_slot(order, ranks)
    if name == "uneven":
        first = experts // 2 + 1
        return ExpertPlacement(
            (tuple(order[:first]), *(tuple(order[first + r :: ranks - 1]) for r in range(ranks - 1)))
        )
    blocks = contiguous(experts, ranks)
    rows = [(*row, *(e for e in (0, 1) if e not in row), EMPTY_ROW) for row in blocks.slots]
    return ExpertPlacement(((*rows[0][:-1], experts - 1), *rows[1:]))
