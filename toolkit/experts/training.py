"""Sharded experts of a model, trained by hooks of the optimizer that they were prepared with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.errors import UserError
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.parallel.collectives import world_size
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.optimizer_rows import step_by_only
from toolkit.experts.parallel.replica_check import ReplicaCheck
from toolkit.experts.parallel.sync import ExpertSync, hook_gradients
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.routing.load_meter import LoadMeter
from toolkit.experts.sharding.prepared_optimizer import fit_optimizer, load_only_own_states
from toolkit.experts.sharding.router_replay import hook_blocks
from toolkit.experts.sharding.shard import PlacementOf, shard_experts


def _refuse_gradient(_: Tensor) -> None:
    raise UserError(
        "prepare: it got no optimizer, so nothing averages gradients over ranks. Give it the optimizer that steps, or "
        "freeze the model with requires_grad_(False)."
    )


class ExpertTraining:
    """Sharded experts of `model`, with their synchronization at each optimizer step.

    Args:
        model: The model, whose experts are sharded in place.
        optimizers: The model's optimizers. The first has all experts. Without one the model can only be evaluated.
        groups: As for `shard_experts`, as are `spare_slots` and `placement`.
        replanner: Rebalances the experts after steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        groups: ExpertGroups | None = None,
        *,
        spare_slots: int = 0,
        placement: InitialPlacement | PlacementOf = "contiguous",
        replanner: Replanner | None = None,
    ):
        self.model, self.optimizers, self.replanner = model, list(optimizers), replanner
        self.stacks: dict[str, ExpertStack] = shard_experts(model, groups, spare_slots=spare_slots, placement=placement)
        self.groups = next(iter(self.stacks.values())).groups
        self.parameters = [p for stack in self.stacks.values() for p in stack.parameters.values()]
        self.prepared = model
        """The model as DDP or FSDP2 wrapped it."""
        self.sync = ExpertSync([])
        self.steps = 0
        """Optimizer steps so far."""
        self._meter: LoadMeter | None = None
        self._undo = ExitStack()
        hook_blocks(model)
        if self.optimizers:
            fit_optimizer(self.optimizers[0], self.stacks)
            if replanner is not None:
                replanner.watch(self.stacks)
                self._undo.callback(replanner.watch, {})

    def follow_steps(self, prepared: nn.Module) -> None:
        """Hook the steps of the optimizer, once DDP or FSDP2 wrapped the model as `prepared`."""
        self.prepared = prepared
        if self.optimizers:
            optimizer = self.optimizers[0]
            rebalance = self.replanner.after_step if self.replanner is not None else None
            self.sync = ExpertSync(self.parameters, rebalance)
            hooks = self.sync.follow(optimizer)
            if world_size() > 1:
                check = ReplicaCheck(prepared)
                hooks.append(optimizer.register_step_pre_hook(check))
                if self.sync.parameters:
                    hooks.append(check.watch_forwards(self.model))
            for stack in self.stacks.values():
                stack.sync = self.sync
            hooks.append(optimizer.register_step_post_hook(lambda *_: self._after_step()))
            hooks += load_only_own_states(optimizer, self.stacks)
            for hook in hooks:
                self._undo.callback(hook.remove)
            for mode in ("train", "eval"):
                if hasattr(optimizer, mode):
                    self._refresh_after(optimizer, mode)
        elif world_size() > 1:
            for hook in hook_gradients(self.parameters, _refuse_gradient):
                self._undo.callback(hook.remove)
        self._undo.callback(step_by_only(self.optimizers[0] if self.optimizers else None, self.parameters))

    def _refresh_after(self, optimizer: Optimizer, mode: str) -> None:
        """Refresh replicas after the method `mode` of a schedule-free optimizer, which sets weights from its states."""
        switch = getattr(optimizer, mode)

        def switch_and_refresh() -> None:
            switch()
            self.sync.refresh_replicas()

        setattr(optimizer, mode, switch_and_refresh)
        self._undo.callback(delattr, optimizer, mode)

    def _after_step(self) -> None:
        self.steps += 1
        if self._meter is not None:
            self._meter.fold_when_many()
        self.sync.after_step(self.steps, self.optimizers[0])

    def metrics(self) -> dict[str, float]:
        """Return balance and traffic over all ranks since the last call, as `ExpertParallel.metrics`."""
        if self._meter is None:
            self._meter = LoadMeter(self.model)
            self._meter.begin(self.steps)
        self._meter.fold()
        return self._meter.read(self.steps)[1]

    def state_dict(self) -> dict[str, Any]:
        """Return steps and the guards' state as plain JSON values. A collective."""
        return {"steps": self.steps, "replanner": self.replanner.state_dict() if self.replanner else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`, after restoring the placement."""
        self.steps = state["steps"]
        if self._meter is not None:
            self._meter.begin(self.steps)
        if self.replanner is not None and state["replanner"] is not None:
            self.replanner.load_state_dict(state["replanner"])

    def close(self) -> None:
        """Remove all hooks. The model stays sharded; steps of optimizers with its experts raise from now on."""
        self._undo.close()
