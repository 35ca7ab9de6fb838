"""Changes a model's experts: carries out plans on weights, optimizer states, router and roster together, in place.

All of it is collective: all ranks carry out the same plan between the same two steps. Parameters keep their shapes and
storages, so DDP and the optimizer need not know. Adam's step count belongs to the stacked parameter and is shared by
its experts; a new expert starts with its parent's moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from toolkit.dynamic.dynamic_layer import dynamic_layers
from toolkit.dynamic.dynamic_router import DynamicRouter, Hyperplane
from toolkit.dynamic.expert_rows import ExpertRows
from toolkit.dynamic.plans import Grow, Merge, Plan
from toolkit.dynamic.roster import ExpertRoster, LifecycleEvent
from toolkit.dynamic.similarity import alignment, reordered
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.parallel.optimizer_rows import unwrapped
from toolkit.experts.parallel.rows_in_use import RowsInUse, mark_rows_in_use


class DynamicExperts:
    """Executor of plans on the dynamic MoE layers of `model`, with a record and undo."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.layers: dict[str, MoE] = dynamic_layers(model)
        self.rosters = {
            name: ExpertRoster.initial(int(_router(layer).active_E.sum()), layer.placement.num_experts)
            for name, layer in self.layers.items()
        }
        self.history: list[LifecycleEvent] = []

    def most_active(self) -> int:
        """Active experts of the layer that has the most; 1 without layers."""
        return max((len(roster) for roster in self.rosters.values()), default=1)

    def carry_out(
        self,
        layer: str,
        plan: Plan,
        optimizer: Optimizer | None,
        *,
        step: int,
        plane: Hyperplane | None = None,
        **detail: Any,
    ) -> None:
        """Change the experts of a layer. A collective.

        Args:
            layer: The name of the layer.
            plan: The change.
            optimizer: The optimizer whose states change with the weights.
            step: The optimizer steps done so far, for roster and record.
            plane: Hyperplane between the tokens of parent and new expert; required for a `Grow`.
            detail: Values to record in addition to the plan's reason.
        """
        stack, router, roster = self.layers[layer].expert_stack, _router(self.layers[layer]), self.rosters[layer]
        rows = ExpertRows(stack, optimizer)
        if isinstance(plan, Grow):
            assert plane is not None, "a split needs a hyperplane"
            parent = roster.logical_id_of(plan.parent)
            self.rosters[layer] = roster.grow(plan.logical_id, step=step, parent=plan.parent)
            rows.write(plan.logical_id, rows.fetch(parent))
            router.split(parent, plan.logical_id, plane)
            _copy_states(optimizer, router.weight, plan.logical_id, parent)
            uids: tuple[int, ...] = (self.rosters[layer].records[-1].uid, plan.parent)
            detail["rank"] = stack.placement.owner(plan.logical_id).rank
        else:
            removed = roster.logical_id_of(plan.uid)
            if isinstance(plan, Merge):
                _average(rows, router.weight, roster.logical_id_of(plan.into), removed, plan.share)
                self.rosters[layer] = roster.merge(plan.uid, into=plan.into, step=step)
                uids = (plan.into, plan.uid)
            else:
                self.rosters[layer] = roster.prune(plan.uid, step=step)
                uids = (plan.uid,)
            rows.write(removed, {})
            router.deactivate(removed)
            _copy_states(optimizer, router.weight, removed, None)
        for parameter in (*stack.parameters.values(), router.weight):
            parameter.grad = None
        kind = type(plan).__name__.lower()
        self.history.append(LifecycleEvent(step, layer, kind, uids, {**detail, **plan.why}))  # type: ignore[arg-type]

    def undo_point(self, optimizer: Optimizer) -> Callable[[], list[LifecycleEvent]]:
        """Return a function that restores the current model, optimizer, rosters and history in place and returns the
        undone events."""
        values = [value for state in unwrapped(optimizer).state.values() for value in state.values()]
        states = [value for value in values if isinstance(value, Tensor)]
        tensors = [*self.model.parameters(), *self.model.buffers(), *states]
        clones = [(tensor, tensor.detach().clone()) for tensor in tensors]
        rosters = dict(self.rosters)
        events = len(self.history)

        @torch.no_grad()
        def undo() -> list[LifecycleEvent]:
            for tensor, clone in clones:
                tensor.copy_(clone)
            self.refresh_routers()
            self.rosters = rosters
            undone = self.history[events:]
            del self.history[events:]
            return undone

        return undo

    def on_trial(self, layer: str, *, step: int, min_age: int, min_experts: int) -> list[int]:
        """Return the uids of removable experts, oldest first: split off, old enough and not kept before; at least
        `min_experts` remain."""
        kept = {uid for event in self.history if (event.layer, event.kind) == (layer, "kept") for uid in event.uids}
        roster = self.rosters[layer]
        uids = [r.uid for r in roster.older_than(min_age, step) if r.parent is not None and r.uid not in kept]
        return uids[: max(0, len(roster) - min_experts)]

    def refresh_routers(self) -> None:
        """Refresh the masks of all routers. Call it after loading weights."""
        for layer in self.layers.values():
            _router(layer).refresh()

    def mark_rows_in_use(self) -> None:
        """Mark this rank's rows up to the last active expert as in use, at least one row."""
        for name, layer in self.layers.items():
            active = {record.logical_id for record in self.rosters[name].active}
            here = layer.placement.slots[layer.expert_stack.groups.ep_rank]
            rows = max((slot + 1 for slot, expert in enumerate(here) if expert in active), default=1)
            for parameter in layer.expert_stack.parameters.values():
                mark_rows_in_use(parameter, rows)

    def rows_in_use(self, prepared: nn.Module, optimizer: Optimizer) -> RowsInUse:
        """Return the `RowsInUse` of all layers' parameters (see `mark_rows_in_use`); `prepared`: the wrapped model."""
        stacks = [layer.expert_stack for layer in self.layers.values()]
        in_ddp = any(isinstance(module, DistributedDataParallel) for module in prepared.modules())
        return RowsInUse([p for stack in stacks for p in stack.parameters.values()], optimizer, in_ddp=in_ddp)

    def state_dict(self) -> dict[str, Any]:
        """Return rosters and history as JSON values."""
        return {
            "rosters": {name: asdict(roster) for name, roster in self.rosters.items()},
            "history": [asdict(event) for event in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rosters = {name: ExpertRoster.from_dict(saved) for name, saved in state["rosters"].items()}
        self.history = [LifecycleEvent(**{**event, "uids": tuple(event["uids"])}) for event in state["history"]]


def _router(layer: MoE) -> DynamicRouter:
    assert isinstance(layer.router, DynamicRouter)
    return layer.router


@torch.no_grad()
def _average(rows: ExpertRows, router_weight: Tensor, remains: int, removed: int, share: float) -> None:
    """Set weights, moments and router row of `remains` to the weighted mean of both experts, after alignment."""
    mine = rows.fetch(remains)
    other = rows.fetch(removed)
    other = reordered(other, alignment(mine, other))
    rows.write(remains, {name: torch.lerp(other[name], row, share) for name, row in mine.items()})
    router_weight[remains] = torch.lerp(router_weight[removed], router_weight[remains], share)


@torch.no_grad()
def _copy_states(optimizer: Optimizer | None, weight: Tensor, row: int, source: int | None) -> None:
    """Copy the optimizer states of a row of `weight` from row `source`; None sets zeros."""
    states = {} if optimizer is None else unwrapped(optimizer).state.get(weight, {})
    for value in states.values():
        if isinstance(value, Tensor) and value.shape == weight.shape:
            value[row] = 0 if source is None else value[source]
