"""Migration of experts: weights and optimizer rows go from one placement to another, in place.

Every rank computes the same schedule of rounds, with the rows that each rank sends, receives and copies. In a round

    park      copy a slot's rows into the row buffer that each rank has, so that the slot is free
    exchange  send and receive the rows of all tensors of all moves at once, into slots whose rows are no longer needed
    settle    copy rows that were received for a slot which was itself sent in this round from the buffer into the slot

so a swap of two experts takes one round, and no rank ever stores more than one expert twice.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.errors import UserError, require, require_type
from toolkit.experts.layer.stack import ExpertStack, bytes_of_slot, expert_stacks
from toolkit.experts.parallel.collectives import extremes_over_ranks
from toolkit.experts.parallel.groups import ExpertGroups, wait_for
from toolkit.experts.parallel.optimizer_rows import require_rows, unwrapped
from toolkit.experts.parallel.ownership import local_rows
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, Place, moves, owner_moves
from toolkit.experts.placement.rounds import Round, schedule
from toolkit.experts.placement.traffic import MigrationCost, migration_cost


@dataclass(frozen=True)
class MigrationReport:
    """Traffic and duration of one migration."""

    cost: MigrationCost
    """Within one EP group; every group sends as much."""
    seconds: float
    """On this rank."""


@torch.no_grad()
def migrate(stack: ExpertStack, new: ExpertPlacement, optimizer: Optimizer | None) -> MigrationReport:
    """Move the rows of `stack` to their slots under `new`, and dispatch by it. A collective of each EP group.

    Call it between an optimizer step and the next backward pass: gradients of the stack are dropped. Every replica gets
    the weights; optimizer rows go from owner to owner. Slots that `new` leaves empty are zeroed, as are the optimizer
    rows of all but owners. Storages stay, so references to the parameters and the optimizer's state remain valid.

    Args:
        stack: The experts of one layer.
        new: A placement of the same experts in the same slots per rank.
        optimizer: The optimizer of the experts, or None.

    Returns:
        The bytes and the time.

    Raises:
        UserError: On every rank alike, for a placement of other experts or slots, and for optimizer state without a row
            per expert.
        ValueError: On every rank alike, if ranks disagree on the placement.
    """
    started = time.perf_counter()
    old = stack.placement
    if old.slots_per_rank != new.slots_per_rank or old.num_experts != new.num_experts:
        raise UserError(
            f"placement: {new.num_experts} experts in {new.slots_per_rank} slots, the layer has {old.num_experts} in "
            f"{old.slots_per_rank}. Move experts between the slots there are."
        )
    groups = stack.groups
    weights = rows_of_weights(stack)
    states = rows_of_states(stack, optimizer)
    _agree(stack, new, weights | states)
    payloads = [
        _Payload(list(weights.values()), schedule(moves(old, new)), groups, stack.device),
        _Payload(list(states.values()), schedule(owner_moves(old, new)) if states else [], groups, stack.device),
    ]
    _carry(payloads)
    for slot, expert in enumerate(new.slots[groups.ep_rank]):
        here = Place(groups.ep_rank, slot)
        if expert == EMPTY_ROW:
            payloads[0].zero(slot)
        if expert == EMPTY_ROW or new.owner(expert) != here:
            payloads[1].zero(slot)
    for parameter in stack.parameters.values():
        parameter.grad = None
    stack.place(new)
    of_weights, of_states = (sum(map(bytes_of_slot, rows.values())) for rows in (weights, states))
    cost = migration_cost(old, new, weight_bytes=of_weights, optimizer_bytes=of_states)
    return MigrationReport(cost, time.perf_counter() - started)


def place_experts(
    model: nn.Module,
    placement: ExpertPlacement | Mapping[str, ExpertPlacement],
    optimizer: Optimizer | None,
) -> dict[str, MigrationReport]:
    """Move experts to a new placement, between a step and the next forward pass. A collective.

    Gradients of experts are dropped.

    Args:
        model: The model.
        placement: The placement of all layers, or of each named layer.
        optimizer: The optimizer of the experts, whose rows move with them. None for a model that is not trained.

    Returns:
        A report for each layer, by its name.

    Raises:
        UserError: On every rank, for an argument of another type, an unknown layer, a model without sharded experts,
            or a placement with different slots or experts;
            under `ExpertParallel` also if gradients wait for a step, or if `optimizer` is not the prepared one.

    Example:
        ```python
        from toolkit.experts import ExpertPlacement, place_experts

        place_experts(model, ExpertPlacement(((0, 2), (1, 3))), optimizer)
        ```
    """
    require_type("model", model, nn.Module, "Pass the model, then the placement and the optimizer")
    require_type("optimizer", optimizer and unwrapped(optimizer), Optimizer | None, "Pass the optimizer of the experts")
    stacks = expert_stacks(model)
    if not stacks:
        raise UserError(
            f"model: {type(model).__name__} has no experts that can move. Make them with make_moe, ExpertParallel or "
            "shard_experts."
        )
    wanted = placement if isinstance(placement, Mapping) else dict.fromkeys(stacks, placement)
    for name, new in wanted.items():
        require_type("placement", new, ExpertPlacement, "Pass an ExpertPlacement, or one for each layer by its name")
        require(name in stacks, "placement", name, f"the layers with experts are {', '.join(stacks)}")
        _require_prepared(optimizer, stacks[name])
    _refuse_new_gradients(stacks.values())
    return {name: migrate(stacks[name], new, optimizer) for name, new in wanted.items()}


def _require_prepared(optimizer: Optimizer | None, stack: ExpertStack) -> None:
    """Raise UserError if the experts were prepared with another optimizer, which has their moments."""
    prepared = stack.sync.optimizer() if stack.sync is not None and stack.sync.optimizer is not None else None
    if prepared is None or prepared in (optimizer, optimizer and unwrapped(optimizer)):
        return
    if optimizer is not None or any(prepared.state.get(parameter) for parameter in stack.parameters.values()):
        raise UserError(
            f"optimizer={optimizer and type(unwrapped(optimizer)).__name__}: the experts were prepared with another "
            "optimizer. Pass that one, whose moments move with them."
        )


def _refuse_new_gradients(stacks: Collection[ExpertStack]) -> None:
    """Raise UserError, on every rank, if experts have gradients that no step has used."""
    waiting = [stack for stack in stacks if stack.sync is not None and stack.sync.awaits_step]
    parameters = [parameter for stack in waiting for parameter in stack.parameters.values()]
    mine = any(bool(local_rows(p.grad).any()) for p in parameters if p.grad is not None)
    most, _ = extremes_over_ranks(torch.tensor(int(mine), device=next(iter(stacks)).device))
    if most:
        raise UserError(
            "placement: experts have gradients that would be lost. Move experts after optimizer.step(), or call "
            "optimizer.zero_grad() before."
        )


# --- tensors with rows -------------------------------------------------------------------------------------------


def rows_of_weights(stack: ExpertStack) -> dict[str, Tensor]:
    """Return name -> (S, ...), the rows that this rank stores."""
    return {name: _with_contiguous_rows(name, local_rows(p)) for name, p in stack.parameters.items()}


def rows_of_states(stack: ExpertStack, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return "<parameter>.<state>" -> (S, ...): moments, master weights, and other optimizer state with a row per slot.

    Scalars, such as Adam's step, are shared by all rows. Raises UserError for tensors without a row per slot.
    """
    rows: dict[str, Tensor] = {}
    if optimizer is None:
        return rows
    all_states = unwrapped(optimizer).state
    for name, parameter in stack.parameters.items():
        for key, value in all_states.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.ndim:
                state = f"{name}.{key}"
                rows[state] = _with_contiguous_rows(state, local_rows(require_rows(name, key, value, parameter)))
    return rows


def optimizer_bytes(stack: ExpertStack, optimizer: Optimizer | None) -> int:
    """Bytes of the state that `optimizer` keeps of one expert of `stack`; 0 before its first step, and without one."""
    return sum(map(bytes_of_slot, rows_of_states(stack, optimizer).values()))


def _with_contiguous_rows(name: str, tensor: Tensor) -> Tensor:
    if len(tensor) and not tensor[0].is_contiguous():
        raise ValueError(f"the rows of {name!r} are not contiguous, so they cannot be received in place")
    return tensor.detach()


def _agree(stack: ExpertStack, new: ExpertPlacement, rows: dict[str, Tensor]) -> None:
    """Raise ValueError if ranks would run different schedules, which would deadlock.

    It is also the collective that NCCL needs before the first exchange in which not all ranks take part.
    """
    group = stack.groups.ep_group
    if group is None:
        return
    layout = [(name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in rows.items()]
    digest = zlib.crc32(repr((stack.placement.slots, new.slots, layout)).encode())
    largest, smallest = extremes_over_ranks(torch.tensor(digest, device=stack.device), group)
    if largest != smallest:
        raise ValueError("ranks disagree on the placement to migrate to, or on which optimizer states the experts have")


# --- the exchange -------------------------------------------------------------------------------------------------


@dataclass
class _Payload:
    """Tensors whose rows move by the same schedule."""

    tensors: list[Tensor]
    rounds: list[Round]
    groups: ExpertGroups
    device: torch.device
    """Device on which rows are exchanged, including CPU-offloaded rows."""
    staged: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    """Device copies of this round for rows that are kept elsewhere, and the row if it receives."""

    def park(self, now: Round) -> None:
        for rank, slot in now.parked:
            if rank == self.groups.ep_rank:
                _copy(self.buffer, self._rows(slot))

    def operations(self, now: Round) -> list[dist.P2POp]:
        """Return this rank's sends and receives; both peers list the transfers between them in the same order."""
        operations = []
        for transfer in now.transfers:
            move = transfer.move
            if move.travels and move.source_rank == self.groups.ep_rank:
                origin = self._rows(move.source_slot, transfer.from_buffer)
                operations += [self._operation(dist.isend, row, move.rank) for row in origin]
            elif move.travels and move.rank == self.groups.ep_rank:
                goal = self._rows(move.slot, transfer.into_buffer)
                operations += [self._operation(dist.irecv, row, move.source_rank) for row in goal]
        return operations

    def copy_within(self, now: Round) -> None:
        """Make the moves within this rank."""
        for transfer in now.transfers:
            move = transfer.move
            if move.rank == self.groups.ep_rank and not move.travels:
                origin = self._rows(move.source_slot, transfer.from_buffer)
                _copy(self._rows(move.slot, transfer.into_buffer), origin)

    def settle(self, now: Round) -> None:
        for here, row in self.staged:
            if row is not None:
                row.copy_(here)
        self.staged = []
        for transfer in now.transfers:
            if transfer.move.rank == self.groups.ep_rank and transfer.into_buffer:
                _copy(self._rows(transfer.move.slot), self.buffer)

    def zero(self, slot: int) -> None:
        for row in self._rows(slot):
            row.zero_()

    @cached_property
    def buffer(self) -> list[Tensor]:
        """One row of each tensor."""
        return [torch.empty_like(tensor[0]) for tensor in self.tensors]

    def _rows(self, slot: int, is_buffered: bool = False) -> list[Tensor]:
        """Return the row of each tensor in `slot`, or in the buffer."""
        return self.buffer if is_buffered else [tensor[slot] for tensor in self.tensors]

    def _operation(self, op: Callable[..., Any], row: Tensor, peer: int) -> dist.P2POp:
        here = row
        if row.device != self.device:
            receives = op is dist.irecv
            here = torch.empty_like(row, device=self.device) if receives else row.to(self.device)
            self.staged.append((here, row if receives else None))
        return dist.P2POp(op, here, group=self.groups.ep_group, group_peer=peer)


def _copy(goal: list[Tensor], origin: list[Tensor]) -> None:
    for row, source in zip(goal, origin, strict=True):
        row.copy_(source)


def _carry(payloads: list[_Payload]) -> None:
    """Run the rounds of all payloads side by side."""
    nothing = Round((), ())
    for rounds in zip_longest(*(payload.rounds for payload in payloads), fillvalue=nothing):
        due = list(zip(payloads, rounds, strict=True))
        for payload, now in due:
            payload.park(now)
        operations = [operation for payload, now in due for operation in payload.operations(now)]
        works = dist.batch_isend_irecv(operations) if operations else []
        for payload, now in due:
            payload.copy_within(now)
        for work, operation in zip(works, operations, strict=False):  # NCCL has one work for all
            wait_for(work, operation.tensor.device)
        for payload, now in due:
            payload.settle(now)
