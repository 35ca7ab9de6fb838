"""The dynamic experts of a model: its layers, which experts they have, and the changes so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from toolkit.experts.dynamic.dynamic_layer import dynamic_layers
from toolkit.experts.dynamic.dynamic_router import DynamicRouter, Hyperplane
from toolkit.experts.dynamic.plans import Grow, Merge, Plan
from toolkit.experts.dynamic.roster import ExpertRoster, LifecycleEvent
from toolkit.experts.dynamic.sleep import Snapshot
from toolkit.experts.dynamic.surgery import Surgeon
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.parallel.optimizer_rows import RowsInUse
from toolkit.experts.parallel.ownership import mark_rows_in_use


class DynamicExperts:
    """Carries out plans on the layers of `model` with dynamic experts and records them; can undo what it did.

    `seed` is that of the layers' initial weights: a fresh expert's depend on it and its uid.
    """

    def __init__(self, model: nn.Module, *, seed: int = 0):
        self.model, self.seed = model, seed
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
        self, layer: str, plan: Plan, optimizer: Optimizer, *, step: int, plane: Hyperplane | None = None, **detail: Any
    ) -> None:
        """Change the experts of `layer`, and record it with `detail` and the plan's reason. A collective."""
        surgeon = Surgeon(self.layers[layer], self.rosters[layer], optimizer, seed=self.seed)
        self.rosters[layer] = surgeon.carry_out(plan, step=step, plane=plane)
        if isinstance(plan, Grow):
            uids: tuple[int, ...] = (self.rosters[layer].records[-1].uid, plan.parent)
            detail["rank"] = self.layers[layer].placement.owner(plan.logical_id).rank
        else:
            uids = (plan.into, plan.uid) if isinstance(plan, Merge) else (plan.uid,)
        kind = type(plan).__name__.lower()
        self.history.append(LifecycleEvent(step, layer, kind, uids, {**detail, **plan.why}))  # type: ignore[arg-type]

    def undo_point(self, optimizer: Optimizer) -> Callable[[], list[LifecycleEvent]]:
        """A function that restores model, optimizer, rosters and history as they are now; returns what it undid."""
        snapshot = Snapshot(self.model, optimizer)
        rosters = dict(self.rosters)
        events = len(self.history)

        def undo() -> list[LifecycleEvent]:
            snapshot.restore()
            self.refresh_routers()
            self.rosters = rosters
            undone = self.history[events:]
            del self.history[events:]
            return undone

        return undo

    def on_trial(self, layer: str, *, step: int, min_age: int, min_experts: int) -> list[int]:
        """uids of experts that were split off, are old enough and were not kept before; oldest first, and as many as
        can be removed."""
        kept = {uid for event in self.history if (event.layer, event.kind) == (layer, "kept") for uid in event.uids}
        roster = self.rosters[layer]
        uids = [r.uid for r in roster.older_than(min_age, step) if r.parent is not None and r.uid not in kept]
        return uids[: max(0, len(roster) - min_experts)]

    def refresh_routers(self) -> None:
        for layer in self.layers.values():
            _router(layer).refresh()

    def mark_rows_in_use(self) -> None:
        """Declare this rank's rows up to that of the last active expert to be in use, at least one."""
        for name, layer in self.layers.items():
            active = {record.logical_id for record in self.rosters[name].active}
            here = layer.placement.experts_on(layer.expert_stack.groups.ep_rank)
            rows = max((slot + 1 for slot, expert in enumerate(here) if expert in active), default=1)
            for parameter in layer.expert_stack.parameters.values():
                mark_rows_in_use(parameter, rows)

    def rows_in_use(self, prepared: nn.Module, optimizer: Optimizer) -> RowsInUse:
        """Of all layers; see `mark_rows_in_use`. `prepared`: the model that is called."""
        stacks = [layer.expert_stack for layer in self.layers.values()]
        in_ddp = any(isinstance(module, DistributedDataParallel) for module in prepared.modules())
        return RowsInUse([p for stack in stacks for p in stack.parameters.values()], optimizer, in_ddp=in_ddp)

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "rosters": {name: roster.to_dict() for name, roster in self.rosters.items()},
            "history": [asdict(event) for event in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rosters = {name: ExpertRoster.from_dict(saved) for name, saved in state["rosters"].items()}
        self.history = [LifecycleEvent(**{**event, "uids": tuple(event["uids"])}) for event in state["history"]]


def _router(layer: MoE) -> DynamicRouter:
    assert isinstance(layer.router, DynamicRouter)
    return layer.router
