"""The seam for parameters that are owned by one rank instead of copied to all.

Accelerate and DDP know one kind of parameter: every rank has a copy, gradients are averaged. An expert that lives on
one rank breaks each of their assumptions in silence. This file holds what has to be done instead, and knows nothing
of experts: it sees parameters whose *rows* have owners.

| what DDP or Accelerate does                                | what is done here                                       |
|------------------------------------------------------------|---------------------------------------------------------|
| overwrites every rank's parameters with those of rank 0    | `prepare` puts owned parameters on DDP's ignore list    |
| averages gradients over ranks                              | `average_owned_gradients`: rows already hold the sum  |
|                                                            | over their group's batches, so add replicas, divide by W|
| keeps equal parameters equal                               | `refresh_replicas`: a row with several copies has one     |
|                                                            | owner, who gets their gradients, steps, and sends it    |
| clips by the norm of local gradients                       | `clip_grad_norm_`: copied part once, owned part summed  |
| saves rank 0's model and optimizer                         | `toolkit.checkpoint.checkpoint` saves each row under its stable id |
| forgets parameters that are added later                    | `refuse_late_parameters`                                |

Each line is a test in `tests/traps/`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import UserError
from toolkit.parallel.fsdp import fully_shard_dense

EMPTY_ROW = -1
"""The id of a row that holds nothing."""


@dataclass(frozen=True)
class ExpertGroups:
    """One world, two views: `ep_size` neighbouring ranks share one set of rows, and the sets are copies of each other.

    With 4 ranks and `ep_size` 2, ranks {0, 1} and {2, 3} are shard groups, {0, 2} and {1, 3} replica groups.
    """

    ep_size: int = 1
    """Ranks that together hold every row once."""
    ep_rank: int = 0
    """This rank's place in its shard group."""
    ep_group: dist.ProcessGroup | None = None
    """The ranks of this shard group; None where there is only this one."""
    expert_dp_group: dist.ProcessGroup | None = None
    """The ranks that hold the same rows as this one; None where there is only this one."""


def make_expert_groups(ep_size: int) -> ExpertGroups:
    """Split the world into shard groups of `ep_size` neighbours. A collective: every rank calls it.

    Raises UserError when `ep_size` does not divide the number of processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if ep_size < 1 or world % ep_size:
        raise UserError(
            f"--ep-size {ep_size} does not divide the {world} process(es) of this launch: "
            f"use one of {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}."
        )
    if world == 1:
        return ExpertGroups()
    rank = dist.get_rank()
    ep_group = expert_dp_group = None
    for first in range(0, world, ep_size):
        ranks = list(range(first, first + ep_size))
        group = dist.new_group(ranks)
        if rank in ranks and ep_size > 1:
            ep_group = group
    for place in range(ep_size):
        ranks = list(range(place, world, ep_size))
        group = dist.new_group(ranks)
        if rank in ranks and len(ranks) > 1:
            expert_dp_group = group
    return ExpertGroups(ep_size, rank % ep_size, ep_group, expert_dp_group)


def sum_over_ranks(value: Tensor) -> Tensor:
    """`value`, added up in place over all ranks where there are several. A collective."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


@dataclass(frozen=True)
class Ownership:
    """What is attached to an owned parameter."""

    row_ids: tuple[int, ...]
    """The stable id of what each row along dimension 0 holds, or `EMPTY_ROW`."""
    groups: ExpertGroups
    rows_of_ranks: tuple[tuple[int, ...], ...] | None = None
    """The row ids of every rank of the shard group, where some ranks have copies of others' rows; else None."""

    @cached_property
    def owner_of(self) -> dict[int, int]:
        """The rank of the shard group that steps each row: the lowest that has a copy. Empty where none is copied."""
        owners: dict[int, int] = {}
        for rank, ids in enumerate(self.rows_of_ranks or ()):
            for row_id in ids:
                owners.setdefault(row_id, rank)
        return owners

    @cached_property
    def owns(self) -> tuple[bool, ...]:
        """Whether each row holds something that this rank steps and saves."""
        here = self.groups.ep_rank
        return tuple(i != EMPTY_ROW and self.owner_of.get(i, here) == here for i in self.row_ids)

    @cached_property
    def copied(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each rank of the shard group, by row id: rows here that it owns, and rows here of which it has a copy."""
        ranks, here = self.rows_of_ranks or (), self.groups.ep_rank
        row_of = {row_id: row for row, row_id in enumerate(self.row_ids) if row_id != EMPTY_ROW}
        borrowed: list[list[int]] = [[] for _ in ranks]
        lent: list[list[int]] = [[] for _ in ranks]
        for row_id in sorted(row_of):
            owner = self.owner_of.get(row_id, here)
            if owner != here:
                borrowed[owner].append(row_of[row_id])
                continue
            for rank, ids in enumerate(ranks):
                if rank != here and row_id in ids:
                    lent[rank].append(row_of[row_id])
        return borrowed, lent


def mark_owned(
    parameter: nn.Parameter,
    *,
    row_ids: Sequence[int],
    groups: ExpertGroups,
    rows_of_ranks: Sequence[Sequence[int]] | None = None,
) -> None:
    """Declare that the rows of `parameter` belong to this rank (and its replicas) under the stable ids `row_ids`.

    `rows_of_ranks` says what every rank of the shard group has, and is needed where rows have copies there.
    """
    if len(row_ids) != parameter.shape[0]:
        raise ValueError(f"{len(row_ids)} row ids for a parameter with {parameter.shape[0]} rows")
    everywhere = None if rows_of_ranks is None else tuple(tuple(ids) for ids in rows_of_ranks)
    parameter.ownership = Ownership(tuple(row_ids), groups, everywhere)  # type: ignore[attr-defined]


def ownership_of(parameter: Tensor) -> Ownership | None:
    """How `parameter` is owned, or None where every rank has a copy."""
    return getattr(parameter, "ownership", None)


def is_owned(parameter: Tensor) -> bool:
    """Whether other ranks hold other rows, so that DDP must leave `parameter` alone."""
    ownership = ownership_of(parameter)
    return ownership is not None and ownership.groups.ep_size > 1


def owned(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of `parameters` that are owned."""
    return [p for p in parameters if is_owned(p)]


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *, dense: str = "ddp"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`accelerator.prepare`, with owned parameters kept out of DDP's broadcast and averaging.

    `dense="fsdp2"` cuts all other parameters into one piece per rank.
    Raises UserError for fp16 with owned parameters, and for FSDP2 with experts that all ranks copy.
    Raises ValueError for an owned parameter that sits on the root module: DDP builds its ignore names from
    sub-module names, so it would skip the broadcast of such a parameter and still average its gradient.
    """
    names = [name for name, p in model.named_parameters() if is_owned(p)]
    for name in names:
        if "." not in name:
            raise ValueError(f"owned parameter {name!r} must live in a sub-module, not on the root")
    if names and accelerator.mixed_precision == "fp16":
        raise UserError(
            "--mixed-precision fp16 cannot be used with experts owned by ranks, because each rank would judge "
            "overflow by its own experts: use bf16, or --parallel-strategy data_parallel."
        )
    if dense == "fsdp2":
        if not names and accelerator.num_processes > 1 and any(ownership_of(p) for p in model.parameters()):
            raise UserError(
                "--dense-parallel fsdp2 leaves experts with their owners, and with --ep-size 1 every process has all: "
                "use a larger --ep-size, or --dense-parallel ddp."
            )
        fully_shard_dense(model, optimizer, accelerator, ignored=owned(model.parameters()))
    elif names and accelerator.num_processes > 1:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    model, optimizer = accelerator.prepare(model, optimizer)
    if isinstance(model, DistributedDataParallel):
        _keep_group_longer_than(model)
    return model, optimizer


def _keep_group_longer_than(model: DistributedDataParallel) -> None:
    """Let Python be the last to let go of the process group of `model`.

    If DDP's reducer is, as it is where a model outlives its run, the group ends with Python's lock held and waits for
    its threads; and one that is about to free the tensors of its last collective waits for that lock, for ever.
    """
    for holder in (model.reducer, model.logger):
        weakref.finalize(holder, _let_go, model.process_group).atexit = False


def _let_go(_group: dist.ProcessGroup) -> None:
    pass


def refuse_late_parameters(model: nn.Module, prepared: Iterable[Tensor]) -> None:
    """Raise ValueError for a trainable parameter that is not among those `prepared`: no rank synchronises it, and no
    optimizer moves it, in silence."""
    known = {id(p) for p in prepared}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(
                f"parameter {name!r} was added after the model was prepared, so it would neither be trained nor "
                "synchronised: allocate it before, and change what it holds"
            )


@torch.no_grad()
def average_owned_gradients(parameters: Sequence[Tensor], world_size: int) -> None:
    """Make the gradients of owned parameters the mean over all ranks' batches, as DDP's are. A collective.

    The backward of the all-to-all already *added up* the contributions of the shard group's batches, where DDP takes
    the *mean* over the world. So: add the replicas' gradients (they saw the other batches), then divide by the number
    of batches, which is the world size, never by the number of replicas. Of a row that has copies in the shard group
    the owner gets the sum, and the others zero.
    """
    sum_replica_gradients(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return
    torch._foreach_div_(grads, float(world_size))
    ownership = ownership_of(parameters[0])
    if ownership is None or ownership.groups.expert_dp_group is None:
        return
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat, group=ownership.groups.expert_dp_group)
    for grad, summed in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(summed)


@torch.no_grad()
def sum_replica_gradients(parameters: Iterable[Tensor]) -> None:
    """Add the gradients of a row's copies to its owner's, and set those of the others to zero. A collective."""
    for parameter, ownership in _with_replicas(parameters):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        borrowed, lent = ownership.copied
        received = _exchange_rows(grad, borrowed, lent, ownership)
        grad.index_fill_(0, _flat(borrowed, grad), 0)
        parameter.grad = grad.index_add_(0, _flat(lent, grad), received)


@torch.no_grad()
def refresh_replicas(parameters: Iterable[Tensor]) -> None:
    """Give the copies of a row the weights that its owner has after its step. A collective."""
    for parameter, ownership in _with_replicas(parameters):
        borrowed, lent = ownership.copied
        received = _exchange_rows(parameter.detach(), lent, borrowed, ownership)
        parameter.index_copy_(0, _flat(borrowed, parameter), received)


def _with_replicas(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Ownership]]:
    for parameter in parameters:
        ownership = ownership_of(parameter)
        if ownership is not None and ownership.rows_of_ranks is not None:
            yield parameter, ownership


def _exchange_rows(rows: Tensor, sent: list[list[int]], received: list[list[int]], ownership: Ownership) -> Tensor:
    """Send the rows listed for each rank of the shard group; returns what came, by rank."""
    result = rows.new_empty(sum(map(len, received)), *rows.shape[1:])
    out = rows.index_select(0, _flat(sent, rows))
    sizes = [len(each) for each in received], [len(each) for each in sent]
    dist.all_to_all_single(result, out, *sizes, group=ownership.groups.ep_group)
    return result


def _flat(lists: list[list[int]], like: Tensor) -> Tensor:
    return torch.tensor([row for each in lists for row in each], dtype=torch.int64, device=like.device)


@torch.no_grad()
def clip_grad_norm_(parameters: Sequence[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm before, a scalar.

    The copied part is counted once, the owned part is summed over its shard group and what FSDP2 has cut over its
    mesh, so every rank gets the same norm and applies the same factor. With `max_norm` None the norm is only measured.
    """
    copied: list[Tensor] = []
    rows: list[Tensor] = []
    pieces: list[Tensor] = []
    mesh: DeviceMesh | None = None
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            pieces.append(parameter.grad.to_local())
            mesh = parameter.grad.device_mesh
        elif parameter.grad is not None:
            (rows if is_owned(parameter) else copied).append(parameter.grad)
    grads = copied + rows + pieces
    if not grads:
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm(grads))
    if rows or mesh is not None:
        of_replicated, of_rows, of_pieces = norms.square().split([len(copied), len(rows), len(pieces)])
        squared_rows, squared_pieces = of_rows.sum(), of_pieces.sum()
        if rows:
            dist.all_reduce(squared_rows, group=_ep_group(parameters))
        if mesh is not None:
            dist.all_reduce(squared_pieces, group=mesh.get_group())
        norm = (of_replicated.sum() + squared_rows + squared_pieces).sqrt()
    else:
        norm = torch.linalg.vector_norm(norms)
    if max_norm is not None:
        factor = max_norm / (norm + 1e-6)
        if factor.device.type != "cpu":
            torch._foreach_mul_(grads, factor.clamp(max=1.0))
        elif factor < 1:  # a host sync elsewhere, but free on a CPU, where it saves a pass over the gradients
            torch._foreach_mul_(grads, factor)
    return norm


def _ep_group(parameters: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """The group over which the owned ones among `parameters` are spread."""
    return next(ownership.groups.ep_group for p in parameters if is_owned(p) and (ownership := ownership_of(p)))


@torch.no_grad()
def replicas_agree(model: nn.Module) -> bool:
    """Whether every copied parameter has the same bits on all ranks, and every owned row on all its replicas."""
    if not dist.is_initialized():
        return True
    agree = torch.ones((), device=next(model.parameters()).device)
    for parameter in model.parameters():
        ownership = ownership_of(parameter)
        group = None
        if ownership is not None and ownership.groups.ep_size > 1:
            group = ownership.groups.expert_dp_group
            if group is None:
                continue
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        agree = torch.minimum(agree, (low == high).all().to(agree))
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    return bool(agree)
