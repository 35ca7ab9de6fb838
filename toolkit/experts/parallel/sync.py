"""The optimizer step of a model with owned parameters, such as experts: one owner of its hooks, checks and clipping."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from toolkit.errors import UserError, require_type
from toolkit.experts.compat import call_before_averaging, call_before_clipping, multiply_each_, norm_of_each
from toolkit.experts.parallel.collectives import together, world_size
from toolkit.experts.parallel.gradient_average import GradientAverage, hook_gradients
from toolkit.experts.parallel.optimizer_rows import (
    check_optimizer,
    load_only_own_states,
    require_rows_of_states,
    step_by_only,
    unwrapped,
)
from toolkit.experts.parallel.ownership import is_owned, is_shard, local_rows, owned, ownership_of
from toolkit.experts.parallel.replica_check import ReplicaCheck
from toolkit.experts.parallel.replicas import refresh_replicas
from toolkit.experts.parallel.rows_in_use import in_use

if TYPE_CHECKING:
    from jaxtyping import Float


_SYNC_OF = WeakTensorKeyDictionary()
"""Expert parameter -> reference to the `ExpertSync` that hooks its steps."""


class ExpertSync:
    """Owner of the optimizer step of a model with sharded experts.

    From now on each step of `optimizer` averages expert gradients before the update, unless `clip` did, and copies each
    row's weights to its replicas after it, as do `optimizer.train()` and `optimizer.eval()` of a schedule-free
    optimizer. A later `ExpertSync` of the same experts replaces this one.

    `clip` and `after_step` are collectives: call them on every rank.

    Args:
        model: The model, inside or outside of DDP.
        optimizer: Has all trainable experts, and must not have other models' parameters. Without one the model can only
            be evaluated: a backward pass raises UserError.
        rebalance: Called by `after_step` as `rebalance(step, optimizer)`, such as `Replanner.after_step`.
        prepared: The model as Accelerate prepared it, after `check_optimizer`. Default: `model`, which is checked here.

    Raises:
        UserError: Updates of the optimizer span several experts, or it lacks an expert or has parameters outside the
            model. Its steps raise, on every rank, if gradients were assigned without a backward pass, or if weights or
            gradients differ between ranks that have them; steps of other optimizers with these experts raise, too.

    Example:
        sync = experts.ExpertSync(model, optimizer, rebalance=replanner.after_step)
        for step, batch in enumerate(batches, start=1):
            loss_of(model, batch).backward()
            sync.clip(model.parameters(), 1.0)
            optimizer.step()
            sync.after_step(step, optimizer)
            optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        rebalance: Callable[[int, Optimizer], object] | None = None,
        *,
        prepared: nn.Module | None = None,
    ) -> None:
        require_type("model", model, nn.Module, "Write ExpertSync(model, optimizer), which checks every step")
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.prepared = model if prepared is None else prepared
        self.rebalance = rebalance
        self.steps = 0
        """Optimizer steps so far."""
        self.optimizer: Callable[[], Optimizer | None] = lambda: None
        """Gives the optimizer, or None."""
        if optimizer is not None:
            if prepared is None:
                check_optimizer(self.model, optimizer)
            self.optimizer = ref(unwrapped(optimizer))
        self._undo = ExitStack()
        self._has_hooks = False
        self.follow()

    @property
    def awaits_step(self) -> bool:
        """Whether gradients arrived since the last step."""
        return self._average.awaits_step

    def follow(self) -> None:
        """Hook the experts and the steps of the optimizer, again after `close`."""
        from torch.distributed.fsdp import FSDPModule

        if self._has_hooks:
            return
        experts = [p for p in self.model.parameters() if ownership_of(p) is not None]
        for former in {_SYNC_OF[p]() for p in experts if p in _SYNC_OF} - {None}:
            former.close()
        optimizer = self.optimizer()
        for mode in ("train", "eval"):
            if optimizer is not None and hasattr(optimizer, mode):
                self._refresh_after(optimizer, mode)
        # FSDP2 leaves experts that it cannot shard to this class, also those of every rank.
        self.parameters = experts if isinstance(self.prepared, FSDPModule) else owned(experts)
        self._has_hooks = True
        self._average = GradientAverage(self.parameters, self.prepared)
        self._states_are_unknown = bool(experts)
        """Whether no step has shown the states of experts."""
        self._check: ReplicaCheck | None = None
        hooks: list[RemovableHandle] = []
        if optimizer is None and world_size() > 1:
            hooks = hook_gradients(experts, _refuse_gradient)
        elif optimizer is not None:
            hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                *self._average.hook(),
                *load_only_own_states(optimizer),
            ]
            if world_size() > 1:
                self._check = ReplicaCheck(self.prepared, owned(experts))
                if self.parameters:
                    hooks.append(self._check.watch_forwards(self.model))
        for hook in hooks:
            self._undo.callback(hook.remove)
        self._undo.callback(step_by_only(optimizer, experts))
        _SYNC_OF.update(dict.fromkeys(experts, ref(self)))

    def close(self) -> None:
        """Remove all hooks. Steps of optimizers with these experts raise UserError from now on."""
        self._undo.close()
        self._has_hooks = False

    def _refresh_after(self, optimizer: Optimizer, mode: str) -> None:
        """Refresh replicas after the method `mode` of a schedule-free optimizer, which sets weights from its states."""
        switch = getattr(optimizer, mode)

        def switch_and_refresh() -> None:
            switch()
            refresh_replicas(self.parameters)

        setattr(optimizer, mode, switch_and_refresh)
        self._undo.callback(delattr, optimizer, mode)

    def _before_step(self, _: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Average and check gradients, after the closure if the step has one."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before_update()
            return None

        def average_after_closure() -> Any:
            loss = closure()
            self._before_update()
            return loss

        return args[:1], {**kwargs, "closure": average_after_closure}

    def _before_update(self) -> None:
        self.before_clip()
        if self._check is not None:
            self._check()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._states_are_unknown:  # their shapes can depend on the size of the parameter
            states = [(p, state) for p, state in optimizer.state.items() if ownership_of(p) is not None]
            together(lambda: require_rows_of_states(type(optimizer).__name__, states))
            self._states_are_unknown = False
        self.steps += 1
        self._average.awaits_step = False
        refresh_replicas(self.parameters)

    def before_clip(self) -> None:
        """Average gradients over the expert data-parallel group, after the last backward pass of a step.

        `clip` and the optimizer step do it, if it was not called. Without new gradients it does nothing.
        """
        if self._average.awaits_average:
            self._average.awaits_average = False
            self._average.finish()
        elif not self._average.awaits_step:
            _refuse_assigned_gradients(self.parameters)

    def clip(
        self,
        parameters: Iterable[Tensor],
        max_norm: float | None,
        *,
        take_norms: Callable[[Sequence[Tensor], Tensor], None] | None = None,
    ) -> Float[Tensor, ""]:
        """Average gradients, and scale them so that their global 2-norm is at most `max_norm`: see `clip_gradients`."""
        self.before_clip()
        return clip_gradients(parameters, max_norm, take_norms=take_norms)

    @torch.no_grad()
    def after_step(self, step: int, optimizer: Optimizer) -> None:
        """Rebalance. A collective.

        Args:
            step: Optimizer steps so far.
            optimizer: The optimizer that made the step.
        """
        if self.rebalance is not None:
            self.rebalance(step, optimizer)

    def begin_evaluation(self) -> None:
        """Let ranks make unequal numbers of forward passes without gradients: the first one waits for no other rank."""
        if self._check is not None:
            self._check.is_evaluating = True

    def check(self, step: int) -> None:
        """Raise UserError on every rank if weights differ between ranks that have them. A collective."""
        if self._check is not None:
            self._check.check(step)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    max_norm: float | None,
    *,
    take_norms: Callable[[Sequence[Tensor], Tensor], None] | None = None,
) -> Float[Tensor, ""]:
    """Scale gradients so that their global 2-norm is at most `max_norm`.

    Replicated parameters count once. Owned parameters are summed over the EP group, and parameters that FSDP2
    shards also over one set of shards. So every rank gets the same norm and applies the same factor.

    Args:
        parameters: Owned and replicated parameters of the model.
        max_norm: The largest norm. None only measures.
        take_norms: Called with parameters and the norm of each parameter's gradient on this rank.

    Returns:
        The norm before clipping, a scalar.
    """
    kinds: list[list[Tensor]] = [[], [], [], []]
    """Replicas, rows, shards, and shards of rows."""
    for parameter in parameters:
        if parameter.grad is not None:
            kinds[2 * is_shard(parameter) + is_owned(parameter)].append(parameter)
    listed = list(itertools.chain.from_iterable(kinds))
    grads = [in_use(p, local_rows(p.grad)) for p in listed if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norms = norm_of_each(grads)
    if take_norms is not None:
        take_norms(listed, norms)
    if len(kinds[0]) < len(listed):
        squares = [squared.sum() for squared in norms.square().split([*map(len, kinds)])]
        for kind, square in zip(kinds, squares, strict=True):
            for group in _groups_with_parts(kind[0]) if kind else ():
                dist.all_reduce(square, group=group)
        norm = sum(squares[1:], squares[0]).sqrt()
    else:
        norm = torch.linalg.vector_norm(norms)
    if max_norm is not None:
        factor = max_norm / (norm + 1e-6)
        if factor.device.type != "cpu":
            multiply_each_(grads, factor.clamp(max=1.0))
        elif not factor >= 1:  # also NaN; a host sync elsewhere, but on a CPU it saves a pass over the gradients
            multiply_each_(grads, factor)
    return norm


@cache
def guard_torch() -> None:
    """Have torch's functions raise that clip by a norm of this rank's experts, or average weights of other experts.

    Before gradients are clipped by value, they are averaged. For ever, because a model stays sharded when its
    `ExpertSync` is closed.
    """
    call_before_clipping(_refuse_norm_of_one_rank, _average_first)
    call_before_averaging(_refuse_average_of_all)


def _refuse_norm_of_one_rank(parameters: list[Tensor]) -> None:
    if owned(parameters):
        raise UserError(
            "clip_grad_norm_: the norm of torch.nn.utils has only this rank's experts. Call "
            "accelerator.clip_grad_norm_ or ExpertSync.clip with all parameters, or leave the experts out."
        )


def _refuse_average_of_all(averages: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    if any(is_owned(p) and not is_owned(average) for average, p in zip(averages, parameters, strict=False)):
        raise UserError(
            "AveragedModel: it was made before the experts were sharded, and has other rows. Make it after prepare or "
            "shard_experts, or call experts.ema_update."
        )


def _average_first(parameters: list[Tensor]) -> None:
    for sync in {_SYNC_OF[parameter]() for parameter in parameters if parameter in _SYNC_OF} - {None}:
        sync.before_clip()


def _refuse_gradient(_: Tensor) -> None:
    raise UserError(
        "optimizer: none was given, so nothing averages gradients over ranks. Give the optimizer that steps, or freeze "
        "the model with requires_grad_(False)."
    )


def _refuse_assigned_gradients(parameters: Iterable[Tensor]) -> None:
    """Raise UserError if `parameters` have gradients, although no backward pass accumulated any. A collective then."""
    grads = [local_rows(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not grads:
        return
    are_assigned = torch.stack([grad.any() for grad in grads]).any().float()  # zeros stay from the last step
    dist.all_reduce(are_assigned, op=dist.ReduceOp.MAX)
    if are_assigned:
        raise UserError(
            "optimizer: gradients of experts were assigned without a backward pass, such as from torch.autograd.grad, "
            "and a reduction over ranks would mix different experts. Call backward on a loss."
        )


def _groups_with_parts(parameter: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups over which ranks have other parts of `parameter`; none if it is replicated."""
    ownership = ownership_of(parameter)
    ep_group = None if ownership is None else ownership.groups.ep_group
    groups = [] if ep_group is None else [ep_group]
    if is_shard(parameter):
        mesh = parameter.device_mesh
        groups += [mesh.get_group(dim) for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
    return groups
