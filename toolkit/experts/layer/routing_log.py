"""The routing of one layer in training, written once and read by everything that needs counts.

`ExpertStack.record` writes each training forward into the stack's `RoutingLog`. A reader holds a cursor and gets what
is new since it last read:

    cursor = stack.log.cursor()                     # sums: (token, expert) pairs per expert
    forwards = stack.log.follow()                   # one entry per forward pass, for values that cannot be summed
    ...
    cursor.new_load_E(); cursor.advance()
    forwards.take()

Not counted: evaluation, forward passes without gradients, recomputation by activation checkpointing, and tokens that
the model's `attention_mask` marks as padding (`toolkit.experts.layer.model_inputs`).
Writing costs one addition per forward pass, without a host sync; entries hold references.

`copy.deepcopy` and pickling of a model give the copy an empty log without readers: forward passes of the copy are not
counted in the original's log, and cursors keep reading the original.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.experts.compat import without_dynamo
from toolkit.experts.layer.rows import count
from toolkit.experts.parallel.collectives import gather_objects, sum_over_ranks
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import ExpertPlacement

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row in the all-to-alls of one layer; 0 before the first forward."""

    dispatched: int
    """Mean of the two passes: with its routing weights, and half of its slots, because slots have no gradients."""
    combined: int


class Choices(NamedTuple):
    """The experts of each token of one forward, including pairs dropped by a capacity."""

    expert_ids_TK: Int[Tensor, "T K"]
    """int64"""
    counted_T: Bool[Tensor, " T"] | None
    """bool: False for padding; None without padding."""

    def counted(self) -> Bool[Tensor, "T K"]:
        """Return `counted_T` for each pair, all True if it is None."""
        if self.counted_T is None:
            return torch.ones_like(self.expert_ids_TK, dtype=torch.bool)
        return self.counted_T[:, None].expand_as(self.expert_ids_TK)

    def load(self, num_experts: int) -> Int[Tensor, " E"]:
        """Return int64 (E), the pairs of each expert without padding."""
        return count(self.expert_ids_TK, num_experts, self.counted())


class RoutedForward(NamedTuple):
    """One training forward of a layer on this rank; tensors on the device."""

    placement: ExpertPlacement
    load_E: Int[Tensor, " E"]
    """int64: pairs per expert, including pairs dropped by a capacity, excluding padding."""
    dropped_E: Int[Tensor, " E"] | None
    """int64: pairs dropped by a capacity; None without a capacity."""
    visits_P: Int[Tensor, " P"] | None
    """int64: tokens that have experts on each rank of the EP group; None for a group of one rank."""
    crossings_G: Int[Tensor, " G"] | None
    """int64: distinct tokens that have experts on each other node of the EP group; None if not counted."""
    row_bytes: RowBytes
    choices: Choices | None
    """None for readers that did not ask."""


class RoutingLog:
    """Assignments per expert on this rank over all training forwards of one layer."""

    def __init__(self, num_experts: int, groups: ExpertGroups | None = None):
        self.num_experts = num_experts
        self.groups = groups or ExpertGroups()
        # Not buffers: DDP broadcasts rank 0's buffers, which would overwrite the counts of the other ranks.
        self.load_E = torch.zeros(num_experts, dtype=torch.int64)
        """Assignments per expert since this process began, dropped ones included."""
        self.last_load_E = self.load_E
        """Load of the last forward pass, in training or evaluation, for router losses."""
        self.last: RoutedForward | None = None
        """The last training forward."""
        self._followers: weakref.WeakSet[ForwardCursor] = weakref.WeakSet()
        # For torch.compile, which cannot trace a WeakSet.
        self._has_readers = False

    def __reduce__(self) -> tuple[Any, ...]:
        return RoutingLog, (self.num_experts, self.groups)

    def cursor(self) -> Cursor:
        """Return a reader of sums, from now on."""
        return Cursor(self)

    def follow(self, *, choices: bool = False) -> ForwardCursor:
        """Return a reader of forward passes from now on, with `choices` also of each token's experts.

        Unread entries are kept until the cursor is garbage collected, so it should read every few steps.
        """
        cursor = ForwardCursor(choices=choices)
        self._followers.add(cursor)
        self._has_readers = True
        return cursor

    def add(self, forward: RoutedForward) -> None:
        """Count one training forward."""
        self.load_E = self.load_E.to(forward.load_E.device) + forward.load_E
        self.last = forward
        if self._has_readers:
            self._deliver(forward)

    # If traced, the growing lists would make torch.compile recompile at each forward pass.
    @without_dynamo
    def _deliver(self, forward: RoutedForward) -> None:
        for follower in self._followers:
            follower.deliver(forward)


class Cursor:
    """Reader of the increase of a log's sums since the last `advance`, in parts that `end_part` ends."""

    def __init__(self, log: RoutingLog):
        self.log = log
        self.advance()

    def advance(self) -> None:
        """Mark everything as read."""
        self._begins = [self.log.load_E]
        """The log's sums at the beginning of each part."""

    def end_part(self) -> None:
        """Begin another part."""
        self._begins.append(self.log.load_E)

    def new_load_SE(self) -> Int[Tensor, "S E"]:
        """Return int64 (S, E), this rank's new assignments per expert in each part."""
        sums = [begin_E.to(self.log.load_E.device) for begin_E in self._begins]
        return torch.stack([*sums, self.log.load_E]).diff(dim=0)

    def new_load_E(self) -> Int[Tensor, " E"]:
        """Return int64 (E), this rank's new assignments per expert."""
        return self.new_load_SE().sum(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the unread counts of all ranks, as JSON values, by source EP rank and part. A collective."""
        groups, new_SE = self.log.groups, self.new_load_SE()
        load_PSE = new_SE.new_zeros(groups.ep_size, *new_SE.shape)
        load_PSE[groups.ep_rank] = new_SE
        return {"load": sum_over_ranks(load_PSE).tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Mark as unread only the counts that were unread in `state`, for any number of ranks."""
        groups, now_E = self.log.groups, self.log.load_E
        load_PSE = torch.tensor(state["load"], device=now_E.device)
        if len(load_PSE) != groups.ep_size:  # other ranks than now: only the sum is of use
            load_PSE = load_PSE.sum(0, keepdim=True)
        unread_SE = torch.zeros_like(load_PSE[0])
        if groups.is_in_first_group and groups.ep_rank < len(load_PSE):
            unread_SE = load_PSE[groups.ep_rank]
        self._begins = list(now_E - unread_SE.flip(0).cumsum(0).flip(0))


class ForwardCursor:
    """The forwards that a log counted and this reader has not taken."""

    def __init__(self, *, choices: bool):
        self.choices = choices
        self._waiting: list[RoutedForward] = []

    def __len__(self) -> int:
        """Forwards that wait to be taken."""
        return len(self._waiting)

    def take(self) -> list[RoutedForward]:
        """Return the forwards since the last time, in order."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def deliver(self, forward: RoutedForward) -> None:
        """Take in a forward; the log calls it."""
        self._waiting.append(forward if self.choices else forward._replace(choices=None))


class Sample(NamedTuple):
    """Some tokens of each rank's last training forward of a layer."""

    choices_PTK: NDArray[np.int32]
    """Experts of each token, by source EP rank; -1 for no expert and for padding."""
    row_bytes: int
    """Bytes of a token's row, dispatched and combined."""


def sample_forwards(logs: Sequence[RoutingLog], tokens: int) -> list[Sample | None]:
    """Return up to `tokens` tokens of each rank per layer; None if no rank had a forward pass. A collective."""
    mine: list[tuple[NDArray[np.int32], int] | None] = []
    for log in logs:
        if log.last is None or log.last.choices is None:
            mine.append(None)
            continue
        chosen, size = log.last.choices, log.last.row_bytes
        ids_TK = chosen.expert_ids_TK.where(chosen.counted(), -1)
        mine.append((ids_TK[:tokens].cpu().numpy().astype(np.int32), size.dispatched + size.combined))
    samples: list[Sample | None] = []
    for log, of_ranks in zip(logs, zip(*gather_objects(mine), strict=True), strict=True):
        known = [each for each in of_ranks if each is not None]
        if not known:
            samples.append(None)
            continue
        groups = log.groups.ep_groups
        choices = np.full((log.groups.ep_size, len(groups), tokens, known[0][0].shape[1]), -1, dtype=np.int32)
        for group, ranks in enumerate(groups):
            for place, rank in enumerate(ranks):
                if (told := of_ranks[rank]) is not None:
                    choices[place, group, : len(told[0])] = told[0]
        samples.append(Sample(choices.reshape(len(choices), -1, choices.shape[-1]), max(size for _, size in known)))
    return samples


def take_loads(cursors: Sequence[Cursor]) -> list[Tensor]:
    """Return int64 (E) of each layer, new assignments per expert over all ranks, and mark them as read. A
    collective."""
    return [parts_SE.sum(0) for parts_SE in take_parts(cursors)]


def take_parts(cursors: Sequence[Cursor]) -> list[Tensor]:
    """Return int64 (S, E) of each layer, new assignments per expert over all ranks in each part, in one reduction, and
    mark them as read. A collective."""
    if not cursors:
        return []
    mine = [cursor.new_load_SE() for cursor in cursors]
    counts = sum_over_ranks(torch.cat([load_SE.flatten() for load_SE in mine]))
    for cursor in cursors:
        cursor.advance()
    sizes = [load_SE.numel() for load_SE in mine]
    return [part.view(load_SE.shape) for part, load_SE in zip(counts.split(sizes), mine, strict=True)]
