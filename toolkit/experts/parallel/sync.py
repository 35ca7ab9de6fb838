"""Synchronization of owned parameters, such as experts, around an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from toolkit.errors import UserError
from toolkit.experts.compat import multiply_each_, norm_of_each
from toolkit.experts.parallel.collectives import world_size
from toolkit.experts.parallel.ownership import Ownership, RowsOfRanks, is_owned, owned, ownership_of
from toolkit.experts.parallel.rows_in_use import in_use

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass
class _Arrivals:
    """State of the parameter hooks; a reference to the `ExpertSync` would keep its parameters alive."""

    await_average: bool = True
    await_step: bool = False

    def note(self, _: Tensor) -> None:
        self.await_average = self.await_step = True


class ExpertSync:
    """Expert-parallel synchronization around an optimizer step.

    `before_clip`, `clip` and `after_step` are collectives: call them on every rank.

    Args:
        parameters: Parameters of the model. Only owned ones, such as experts, are synchronized.
        rebalance: Called as `rebalance(step, optimizer)` after each step, such as `Replanner.after_step`.

    Example:
        sync = experts.ExpertSync(model.parameters(), rebalance=replanner.after_step)
        for step, batch in enumerate(batches, start=1):
            loss_of(model, batch).backward()
            sync.before_clip()
            sync.clip(model.parameters(), 1.0)
            optimizer.step()
            sync.after_step(step, optimizer)
            optimizer.zero_grad()
    """

    def __init__(
        self, parameters: Iterable[Tensor], rebalance: Callable[[int, Optimizer], object] | None = None
    ) -> None:
        self.parameters = owned(parameters)
        self.rebalance = rebalance
        self._arrivals = _Arrivals()
        self.optimizer: Callable[[], Optimizer | None] | None = None
        """Gives the optimizer of `follow`."""

    @property
    def awaits_step(self) -> bool:
        """Whether gradients arrived since the last step of the optimizer of `follow`."""
        return self._arrivals.await_step

    def follow(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Have each step of `optimizer` call `before_clip`, which from now on does nothing without new gradients.

        Returns:
            The hooks.
        """
        self.optimizer = ref(optimizer)
        self._arrivals.await_average = False
        hooks = [optimizer.register_step_pre_hook(lambda *_: self.before_clip())]
        return hooks + hook_gradients(self.parameters, self._arrivals.note)

    @torch.no_grad()
    def before_clip(self) -> None:
        """Average gradients over the expert data-parallel group, after the last backward pass of a step.

        Token dispatch takes the mean over the EP group's batches. The owner of a row with replicas gets the gradients
        of all, the others get zero.
        """
        if not self._arrivals.await_average:
            if not self._arrivals.await_step:
                _refuse_assigned_gradients(self.parameters)
            return
        self._arrivals.await_average = self.optimizer is None
        _sum_replica_gradients(self.parameters)
        for parameter in self.parameters:
            groups = _ownership(parameter).groups
            if parameter.grad is None or groups.expert_dp_group is None:
                continue
            grad = in_use(parameter, parameter.grad).div_(world_size(groups.expert_dp_group))
            summed = grad.contiguous()
            dist.all_reduce(summed, group=groups.expert_dp_group)
            if summed is not grad:
                grad.copy_(summed)

    @torch.no_grad()
    def clip(
        self,
        parameters: Iterable[Tensor],
        max_norm: float | None,
        *,
        take_norms: Callable[[Sequence[Tensor], Tensor], None] | None = None,
    ) -> Float[Tensor, ""]:
        """Scale gradients so that their global 2-norm is at most `max_norm`.

        Replicated parameters count once. Owned parameters are summed over the EP group, and parameters that FSDP2
        shards over one set of shards. So every rank gets the same norm and applies the same factor.

        Args:
            parameters: Owned and replicated parameters of the model.
            max_norm: The largest norm. None only measures.
            take_norms: Called with parameters and the norm of each parameter's gradient on this rank.

        Returns:
            The norm before clipping, a scalar.
        """
        replicated: list[Tensor] = []
        rows: list[Tensor] = []
        shards: list[Tensor] = []
        sharded_over: list[dist.ProcessGroup] = []
        for parameter in parameters:
            if isinstance(parameter.grad, DTensor):
                shards.append(parameter)
                placements = enumerate(parameter.grad.placements)
                mesh = parameter.grad.device_mesh
                sharded_over = sharded_over or [mesh.get_group(dim) for dim, place in placements if place.is_shard()]
            elif parameter.grad is not None:
                (rows if is_owned(parameter) else replicated).append(parameter)
        listed = replicated + rows + shards
        grads = [
            p.grad.to_local() if isinstance(p.grad, DTensor) else in_use(p, p.grad)
            for p in listed
            if p.grad is not None
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
                dist.all_reduce(squared_rows, group=_ownership(rows[0]).groups.ep_group)
            for group in sharded_over:
                dist.all_reduce(squared_shards, group=group)
            norm = (of_replicated.sum() + squared_rows + squared_shards).sqrt()
        else:
            norm = torch.linalg.vector_norm(norms)
        if max_norm is not None:
            factor = max_norm / (norm + 1e-6)
            if factor.device.type != "cpu":
                multiply_each_(grads, factor.clamp(max=1.0))
            elif not factor >= 1:  # also NaN; a host sync elsewhere, but on a CPU it saves a pass over the gradients
                multiply_each_(grads, factor)
        return norm

    @torch.no_grad()
    def after_step(self, step: int, optimizer: Optimizer) -> None:
        """Copy each row's weights from its owner to the replicas, and rebalance.

        Args:
            step: Optimizer steps so far.
            optimizer: The optimizer that made the step.
        """
        self._arrivals.await_step = False
        self.refresh_replicas()
        if self.rebalance is not None:
            self.rebalance(step, optimizer)

    @torch.no_grad()
    def refresh_replicas(self) -> None:
        """Copy each row's weights from its owner to the replicas. A collective of the EP group.

        Replicas' optimizer states are out of date, so whatever sets weights from states calls this, such as the
        `train()` and `eval()` of a schedule-free optimizer.
        """
        # The optimizer also steps a parameter that was frozen after its gradient arrived.
        for parameter, ownership in _with_replicas(p for p in self.parameters if p.requires_grad or p.grad is not None):
            borrowed, lent = ownership.replicas_on(parameter.device)
            received = _exchange_rows(parameter.detach(), lent, borrowed, ownership)
            parameter.index_copy_(0, borrowed.rows, received)


def hook_gradients(parameters: Iterable[Tensor], hook: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Call `hook` with each of `parameters` that a backward pass accumulates a gradient of, once it is unfrozen."""
    hooks = []
    for parameter in parameters:
        if parameter.is_floating_point():
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen parameter takes no hooks
            hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(is_trained)
    return hooks


def _refuse_assigned_gradients(parameters: Iterable[Tensor]) -> None:
    """Raise UserError if `parameters` have gradients, although no backward pass accumulated any. A collective then."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return
    are_assigned = torch.stack([grad.any() for grad in grads]).any().float()  # zeros stay from the last step
    dist.all_reduce(are_assigned, op=dist.ReduceOp.MAX)
    if are_assigned:
        raise UserError(
            "optimizer: gradients of experts were assigned without a backward pass, such as from torch.autograd.grad, "
            "and a reduction over ranks would mix different experts. Call accelerator.backward(loss)."
        )


def _sum_replica_gradients(parameters: Iterable[Tensor]) -> None:
    """Add the gradients of a row's replicas to its owner's gradient, and zero the replicas' gradients.

    Frozen parameters keep no gradient: weight decay changes parameters whose gradient is zero.
    """
    for parameter, ownership in _with_replicas(p for p in parameters if p.requires_grad):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        borrowed, lent = ownership.replicas_on(grad.device)
        received = _exchange_rows(grad, borrowed, lent, ownership)
        grad.index_fill_(0, borrowed.rows, 0)
        parameter.grad = grad.index_add_(0, lent.rows, received)


def _with_replicas(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Ownership]]:
    for parameter in parameters:
        ownership = _ownership(parameter)
        if ownership.rows_of_ranks is not None:
            yield parameter, ownership


def _ownership(parameter: Tensor) -> Ownership:
    ownership = ownership_of(parameter)
    assert ownership is not None
    return ownership


def _exchange_rows(rows: Tensor, sent: RowsOfRanks, received: RowsOfRanks, ownership: Ownership) -> Tensor:
    """Send rows to each rank of the EP group and return the received rows, in order of rank."""
    result = rows.new_empty(len(received.rows), *rows.shape[1:])
    out = rows.index_select(0, sent.rows)
    dist.all_to_all_single(result, out, received.sizes, sent.sizes, group=ownership.groups.ep_group)
    return result
