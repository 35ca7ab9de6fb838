"""Gradients of owned parameters: averaged over ranks, kept equal among replicas, and clipped by one global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.experts.compat import divide_each_, flattened, multiply_each_, norm_of_each, unflattened
from toolkit.experts.parallel.ownership import Ownership, RowsOfRanks, in_use, is_owned, ownership_of


@torch.no_grad()
def average_owned_gradients(parameters: Sequence[Tensor], batches: int) -> None:
    """Make the gradients of owned parameters the mean over all ranks' batches, as DDP's are. A collective.

    The backward of the all-to-all has already *summed* the contributions of the EP group's batches, where DDP takes
    the *mean* over the world. So: sum over the expert data-parallel group, and divide by `batches`, the number of
    processes (or the size of the expert data-parallel group, where gradients have been divided by `ep_size` already).
    Of a row with replicas within the EP group the owner gets the sum, the others zero.
    """
    sum_replica_gradients(parameters)
    grads = [in_use(p, p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return
    if batches > 1:
        divide_each_(grads, float(batches))
    ownership = ownership_of(parameters[0])
    if ownership is None or ownership.groups.expert_dp_group is None:
        return
    flat = flattened(grads)
    dist.all_reduce(flat, group=ownership.groups.expert_dp_group)
    for grad, summed in zip(grads, unflattened(flat, grads), strict=True):
        grad.copy_(summed)


def average_in_backward(parameter: nn.Parameter, is_synchronising: Callable[[], bool]) -> None:
    """Average the gradient of an owned parameter over all ranks' batches as soon as its backward is complete.

    Each incoming gradient, a sum over the EP group's batches, is divided by `ep_size` on arrival, so that the mean
    over the expert data-parallel group may be taken again where a loop synchronises more than once before a step.
    `is_synchronising`: whether this backward is the last of a step, on all ranks alike. Where that backward has no
    gradient of the parameter, `average_accumulated` averages what earlier micro-batches left. A parameter that is
    frozen now may be unfrozen later.

    Raises RuntimeError for a parameter that has these hooks: its gradient would be divided twice.
    """
    ownership = ownership_of(parameter)
    assert ownership is not None
    if ownership.averaging:
        raise RuntimeError("the gradient of this parameter is averaged in the backward already")
    if not parameter.is_floating_point():
        return  # packed numbers, which have no gradient
    groups = ownership.groups

    def complete(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        record = ownership_of(parameter)  # of now: a migration makes a new one
        assert record is not None
        record.awaits_average = not is_synchronising()
        if not record.awaits_average:
            average_owned_gradients([parameter], groups.expert_dp_size)

    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one takes no hooks
    ownership.averaging = (
        parameter.register_hook(lambda grad: grad / groups.ep_size),
        parameter.register_post_accumulate_grad_hook(complete),
    )
    parameter.requires_grad_(is_trained)


def stop_averaging(parameter: Tensor) -> None:
    """Remove the hooks of `average_in_backward`, where `parameter` has them."""
    ownership = ownership_of(parameter)
    assert ownership is not None
    for hook in ownership.averaging:
        hook.remove()
    ownership.averaging = ()


def average_accumulated(parameters: Iterable[Tensor]) -> None:
    """Average the gradients that no backward averaged, because the last micro-batch of the step skipped their layer.
    Call it before gradients are clipped, and before the step. A collective: all ranks have used the same parameters."""
    for parameter in parameters:
        ownership = ownership_of(parameter)
        if ownership is None or not ownership.awaits_average:
            continue
        ownership.awaits_average = False
        if parameter.grad is not None:  # else it was dropped
            average_owned_gradients([parameter], ownership.groups.expert_dp_size)


@torch.no_grad()
def sum_replica_gradients(parameters: Iterable[Tensor]) -> None:
    """Add the gradients of a row's replicas to its owner's, and zero those of the others. A collective.

    Frozen parameters keep none: weight decay moves what has a gradient of zero.
    """
    for parameter, ownership in _with_replicas(p for p in parameters if p.requires_grad):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        borrowed, lent = ownership.replicated_on(grad.device)
        received = _exchange_rows(grad, borrowed, lent, ownership)
        grad.index_fill_(0, borrowed.index_N, 0)
        parameter.grad = grad.index_add_(0, lent.index_N, received)


@torch.no_grad()
def refresh_replicas(parameters: Iterable[Tensor]) -> None:
    """Copy the weights of each row's owner to its replicas, after the optimizer step. A collective."""
    for parameter, ownership in _with_replicas(parameters):
        borrowed, lent = ownership.replicated_on(parameter.device)
        received = _exchange_rows(parameter.detach(), lent, borrowed, ownership)
        parameter.index_copy_(0, borrowed.index_N, received)


def _with_replicas(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Ownership]]:
    for parameter in parameters:
        ownership = ownership_of(parameter)
        if ownership is not None and ownership.rows_of_ranks is not None:
            yield parameter, ownership


def _exchange_rows(rows: Tensor, sent: RowsOfRanks, received: RowsOfRanks, ownership: Ownership) -> Tensor:
    """Send rows to each rank of the EP group; returns what was received, in order of rank."""
    result = rows.new_empty(len(received.index_N), *rows.shape[1:])
    out = rows.index_select(0, sent.index_N)
    dist.all_to_all_single(result, out, received.sizes, sent.sizes, group=ownership.groups.ep_group)
    return result


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float | None,
    *,
    take_norms: Callable[[Sequence[Tensor], Tensor], None] | None = None,
) -> Float[Tensor, ""]:
    """Scales all gradients so that their global 2-norm is at most `max_norm`. A collective of all ranks.

    Replicated parameters count once, owned ones are summed over the EP group, and what FSDP2 shards over one set of
    shards, so every rank gets the same norm and applies the same factor.

    Args:
        parameters: All of the model's, owned and replicated.
        max_norm: None only measures.
        take_norms: Is called with parameters and the norm of each one's gradient on this rank.

    Returns:
        The norm before, a scalar.
    """
    parameters = list(parameters)
    replicated: list[Tensor] = []
    rows: list[Tensor] = []
    shards: list[Tensor] = []
    sharded_over: list[dist.ProcessGroup] = []
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            shards.append(parameter)
            sharded_over = sharded_over or _sharded_over(parameter.grad)
        elif parameter.grad is not None:
            (rows if is_owned(parameter) else replicated).append(parameter)
    listed = replicated + rows + shards
    grads = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else in_use(p, p.grad) for p in listed if p.grad is not None
    ]
    if not grads:
        return torch.zeros(())
    norms = norm_of_each(grads)
    if take_norms is not None:
        take_norms(listed, norms)
    if rows or shards:
        of_replicated, of_rows, of_shards = norms.square().split([len(replicated), len(rows), len(shards)])
        squared_rows = of_rows.sum()
        squared_shards = of_shards.sum()
        if rows:
            dist.all_reduce(squared_rows, group=_ep_group(parameters))
        for group in sharded_over:
            dist.all_reduce(squared_shards, group=group)
        norm = (of_replicated.sum() + squared_rows + squared_shards).sqrt()
    else:
        norm = torch.linalg.vector_norm(norms)
    if max_norm is not None:
        factor = max_norm / (norm + 1e-6)
        if factor.device.type != "cpu":
            multiply_each_(grads, factor.clamp(max=1.0))
        elif factor < 1:  # a host sync elsewhere, but free on a CPU, where it saves a pass over the gradients
            multiply_each_(grads, factor)
    return norm


def _sharded_over(tensor: DTensor) -> list[dist.ProcessGroup]:
    """The groups that hold different parts of `tensor`, one for each such dimension of its mesh."""
    return [tensor.device_mesh.get_group(dim) for dim, place in enumerate(tensor.placements) if place.is_shard()]


def _ep_group(parameters: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """The EP group of the owned ones among `parameters`."""
    return next(ownership.groups.ep_group for p in parameters if is_owned(p) and (ownership := ownership_of(p)))
