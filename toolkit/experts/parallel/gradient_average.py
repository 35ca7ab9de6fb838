"""Average of expert gradients over the expert data-parallel group, while the backward pass computes other gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from toolkit.experts.parallel.collectives import world_size
from toolkit.experts.parallel.ownership import is_shard, local_rows, ownership_of
from toolkit.experts.parallel.replicas import sum_replica_gradients
from toolkit.experts.parallel.rows_in_use import in_use

BUCKET_BYTES = 25 * 2**20
"""Gradients share an all-reduce up to this size, as in DDP."""


@dataclass
class _Bucket:
    """Parameters whose gradients are reduced at once."""

    parameters: list[Tensor]
    group: dist.ProcessGroup
    arrived: set[Tensor] = field(default_factory=set)
    """Parameters with a gradient of this step."""
    begun: list[Tensor] = field(default_factory=list)
    """Parameters whose gradients `work` reduces, also if they are frozen before it ends."""
    work: dist.Work | None = None
    summed: Tensor | None = None
    """The gradients that `work` reduces: of a single parameter the gradient itself, otherwise a copy."""
    is_stale: bool = False
    """Whether a parameter got two gradients."""

    @property
    def trained(self) -> list[Tensor]:
        return [p for p in self.parameters if p.requires_grad or p.grad is not None]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to average the gradients. A parameter without a gradient contributes zeros."""
        self.begun, self.work = self.trained, None
        if not self.begun:
            return
        grads = [
            in_use(p, torch.zeros_like(local_rows(p)) if p.grad is None else local_rows(p.grad)) for p in self.begun
        ]
        is_alone = len(grads) == 1 and grads[0].is_contiguous()
        self.summed = grads[0] if is_alone else torch.cat([grad.flatten() for grad in grads])
        self.summed.div_(world_size(self.group))
        self.work = dist.all_reduce(self.summed, group=self.group, async_op=True)

    def end(self, used_elsewhere: set[Tensor]) -> None:
        """Wait for the average, and make it the gradients."""
        if self.work is not None and self.summed is not None:
            self.work.wait()
            sizes = [in_use(p, local_rows(p)).numel() for p in self.begun]
            for parameter, average in zip(self.begun, self.summed.flatten().split(sizes), strict=True):
                if parameter.grad is None and parameter in used_elsewhere:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad is not None:
                    grad = in_use(parameter, local_rows(parameter.grad))
                    if grad.data_ptr() != average.data_ptr():
                        grad.copy_(average.view(grad.shape))
        self.arrived.clear()
        self.work, self.summed, self.is_stale = None, None, False


class GradientAverage:
    """Averages gradients of owned parameters over the expert data-parallel (EDP) group.

    Token dispatch takes the mean over the EP group's batches, and FSDP2 the mean of its shards. All other gradients are
    reduced in buckets, in the reverse order of parameters on every rank. Under DDP, a bucket begins during the backward
    pass, when its gradients are complete and the buckets before it have begun.

    Args:
        parameters: Owned parameters.
        prepared: The model as it is called. Unless it is in DDP, `finish` begins all buckets.
    """

    def __init__(self, parameters: Sequence[Tensor], prepared: nn.Module | None = None):
        self.parameters = parameters
        self._ddp = prepared if isinstance(prepared, DistributedDataParallel) else None
        self._buckets = _buckets(parameters)
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._begun = 0
        self._can_begin = False
        """Whether each parameter got one gradient in the last step, so that no backward pass adds to it later."""
        self.awaits_average = False
        """Whether gradients arrived since the last average."""
        self.awaits_step = False
        """Whether gradients arrived since the last step."""

    def hook(self) -> list[RemovableHandle]:
        """Note each gradient that a backward pass accumulates. Hooks do not keep the parameters in memory."""
        mine = ref(self)

        def note(parameter: Tensor) -> None:
            if (average := mine()) is not None:
                average.note(parameter)

        return hook_gradients(self.parameters, note)

    def note(self, parameter: Tensor) -> None:
        """Begin the buckets that are complete with the gradient of `parameter`."""
        self.awaits_average = self.awaits_step = True
        if (bucket := self._bucket_of.get(parameter)) is None:
            return
        bucket.is_stale |= parameter in bucket.arrived
        bucket.arrived.add(parameter)
        if not self._can_begin or self._ddp is None or not self._ddp.require_backward_grad_sync:
            return
        while self._begun < len(self._buckets) and self._buckets[self._begun].arrived.issuperset(
            self._buckets[self._begun].trained
        ):
            self._buckets[self._begun].begin()
            self._begun += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Average the gradients of a step. A collective.

        If a rank skipped a layer, it gets the gradients of the ranks that did not. The owner of a row with replicas
        gets the gradients of all, the others get zero.
        """
        if self._buckets:
            self._average()
        sum_replica_gradients(self.parameters)

    def _average(self) -> None:
        self._can_begin = not any(bucket.is_stale for bucket in self._buckets)
        for number, bucket in enumerate(self._buckets):
            if number >= self._begun or bucket.is_stale:
                bucket.begin()
        self._begun = 0
        trained = [parameter for bucket in self._buckets for parameter in bucket.trained]
        used = torch.tensor([float(p.grad is not None) for p in trained], device=self._buckets[0].parameters[0].device)
        dist.all_reduce(used, group=self._buckets[0].group)
        # A host sync only on a rank that skipped a layer.
        numbers = used.tolist() if any(parameter.grad is None for parameter in trained) else []
        used_elsewhere = {parameter for parameter, number in zip(trained, numbers, strict=False) if number}
        for bucket in self._buckets:
            bucket.end(used_elsewhere)


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


def _buckets(parameters: Iterable[Tensor]) -> list[_Bucket]:
    """Return the buckets of the parameters that ranks of an EDP group have whole, the last ones first."""
    buckets: list[_Bucket] = []
    size = 0
    for parameter in reversed(list(parameters)):
        ownership = ownership_of(parameter)
        group = None if ownership is None else ownership.groups.expert_dp_group
        if group is None or is_shard(parameter):
            continue
        bytes_here = local_rows(parameter).nbytes
        last = buckets[-1] if buckets else None
        is_alike = last is not None and (last.group, last.parameters[0].dtype, last.parameters[0].device) == (
            group,
            parameter.dtype,
            parameter.device,
        )
        if last is not None and is_alike and size + bytes_here <= BUCKET_BYTES:
            last.parameters.append(parameter)
            size += bytes_here
        else:
            buckets.append(_Bucket([parameter], group))
            size = bytes_here
    return buckets
