"""Collectives of values and objects, and work that succeeds on every rank or raises on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from toolkit.errors import Preempted, UserError
from toolkit.experts.compat import default_store
from toolkit.experts.parallel.waits import waits

if TYPE_CHECKING:
    from jaxtyping import Shaped

T = TypeVar("T")

_KINDS: tuple[type[Exception], ...] = (RuntimeError, UserError, OSError)
"""In order of precedence: a bug comes before a full disk, which may be its consequence."""


def rank() -> int:
    """Return the rank of this process; 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is the main process, which is rank 0."""
    return rank() == 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks of `group`, by default the world; 1 for a single process."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def meet(called: str, group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of `group`, by default of the world, are in the call `called` of a training loop.

    The wait ends before the timeout of the process group, whose own error names no rank.

    Raises:
        UserError: With the ranks that are missing.
    """
    if world_size(group) == 1:
        return
    store, ranks = default_store(), dist.get_process_group_ranks(group or dist.group.WORLD)
    limit = 0.9 * store.timeout
    count = store.add(f"{called}/{rank()}", 1)
    met = f"{called}/{ranks[0]}/{count}"
    if store.add(f"{met}/arrived", 1) == len(ranks):
        store.set(met, "")
    try:
        store.wait([met], limit)
    except dist.DistStoreError:
        missing = [str(each) for each in ranks if store.add(f"{called}/{each}", 0) < count]
        raise UserError(
            f"{called}: rank {', '.join(missing)} did not come within {limit}. Call it on every rank."
        ) from None


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank, in order of rank. A collective of `group`, by default of all ranks."""
    if world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sum_over_ranks(value: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Sum `value` in place over all ranks and return it. A collective."""
    if dist.is_initialized():
        waits.timed("losses", value.device, dist.all_reduce, value)
    return value


def extremes_over_ranks(
    value: Shaped[Tensor, "*shape"], group: dist.ProcessGroup | None = None
) -> tuple[Shaped[Tensor, "*shape"], Shaped[Tensor, "*shape"]]:
    """Return the element-wise maximum and minimum over the ranks of `group`; None: all ranks. One collective.

    If the two are equal, `value` is equal on all ranks.
    """
    if not dist.is_initialized():
        return value, value
    extremes = torch.stack([value, -value])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return extremes[0], -extremes[1]


def broadcast_from_main(tensor: Tensor) -> None:
    """Overwrite `tensor` with the main process's, as DDP does with a model. A collective."""
    if world_size() > 1:
        moved = (tensor.cuda() if dist.get_backend() == "nccl" else tensor).contiguous()
        dist.broadcast(moved, src=0)
        if moved is not tensor:
            tensor.copy_(moved)


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the result of `work` on every rank, in order of rank. A collective of `group`, by default of all ranks.

    If it failed on one rank, all raise: UserError unchanged, OSError if the disk was the cause, else RuntimeError. A
    rank that was preempted raises `Preempted`.
    """
    result, failure = None, None
    try:
        result = work()
    except (Exception, Preempted) as error:
        failure = error
    report = None if failure is None else (_KINDS.index(_kind(failure)), str(failure) or type(failure).__name__)
    outcomes = gather_objects((result, report), group)
    failures = [(*report, rank) for rank, (_, report) in enumerate(outcomes) if report is not None]
    if isinstance(failure, Preempted):
        raise failure
    if failures:
        kind, message, rank = min(failures)
        where = f" on rank {rank}" if len(outcomes) > 1 and _KINDS[kind] is not UserError else ""
        raise _KINDS[kind](message + where) from failure
    return [result for result, _ in outcomes]  # type: ignore[misc]


def on_main(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result of `work`, which only the main process does, on every rank. A collective; raises as `together`."""
    return together(lambda: work() if is_main() else None, group)[0]  # type: ignore[return-value]


def _kind(failure: BaseException) -> type[Exception]:
    if isinstance(failure, UserError):
        return UserError
    of_rust = "(os error " in str(failure)  # whose libraries have no type for errors of the system
    return OSError if of_rust or isinstance(failure, (OSError, SafetensorError)) else RuntimeError
