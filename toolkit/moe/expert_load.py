"""The callback that puts balance and traffic on each line of metrics."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from toolkit.callbacks.base import Callback
from toolkit.moe.forwards import ForwardLoads
from toolkit.moe.metrics import (
    Counts,
    Window,
    balance_metrics,
    count,
    expert_metrics,
    replica_metrics,
    traffic_metrics,
)
from toolkit.moe.stack import ExpertStack

if TYPE_CHECKING:
    from toolkit.trainer import Trainer

MOST_WAITING = 512
"""Forwards whose loads are kept before they are added up, however rare the lines of metrics are."""


class ExpertLoad(Callback):
    """Records on each line of metrics how the line's tokens spread over experts and ranks; one reduction a line.

    `moe/load/<layer>`: the fraction of routed copies of each expert; and over all layers what
    `toolkit.moe.metrics` computes: `expert_metrics` always, and where experts are spread over ranks `balance_metrics`,
    `traffic_metrics` and `replica_metrics`. The result `min_expert_load` is the smallest fraction over the last whole
    epoch, of experts that lived through it. `ranks_per_node` None takes what the launcher says.
    """

    def __init__(self, model: nn.Module, *, ranks_per_node: int | None = None):
        self.forwards = ForwardLoads(model)
        self.names = self.forwards.names
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.rank, self.world_size = rank, world
        per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))
        self.node_of_rank = [r // per_node for r in range(world)]
        self._line = self._empty()
        self._epoch_load_LE = self._line.load_LE
        self._line_began = 0
        self._lived_LE = self.forwards.living()
        """Who lived when this epoch began."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self._line_began = self._line_began or trainer.state.step

    def on_step_end(self, trainer: Trainer) -> None:
        if not self.names:
            return
        if len(self.forwards) >= MOST_WAITING:
            self._fold()
        ends_epoch = trainer.state.step % trainer.batches.steps_per_epoch == 0
        if not (trainer.at_log_step or ends_epoch):
            return
        self._fold()
        if ends_epoch:
            load_LE, self._epoch_load_LE = self._epoch_load_LE, self._empty().load_LE
            living_LE = self.forwards.living()
            whole_LE, self._lived_LE = living_LE & self._lived_LE, living_LE
            if load_LE.any(1).all():
                share_LE = load_LE / load_LE.sum(1, keepdims=True)
                trainer.results["min_expert_load"] = float(share_LE[whole_LE].min(initial=1))
        if trainer.at_log_step:
            self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        line, self._line = self._line, self._empty()
        steps, self._line_began = trainer.state.step - self._line_began, trainer.state.step
        if not line.load_LE.any(1).all():
            return
        metrics: dict[str, Any] = {
            f"moe/load/{name}": (load_E / load_E.sum()).tolist()
            for name, load_E in zip(self.names, line.load_LE, strict=True)
        }
        living = zip(line.load_LE, self.forwards.living(), strict=True)
        metrics |= expert_metrics([load_E[living_E] for load_E, living_E in living])
        if self.forwards.may_drop:
            metrics["moe/dropped_fraction"] = float(line.dropped_LE.sum() / line.load_LE.sum())
        stacks = self.forwards.stacks
        if stacks[0].groups.ep_size > 1:
            placements = [stack.placement for stack in stacks]
            metrics |= balance_metrics(line, placements)
            metrics |= traffic_metrics(line, self.forwards.row_bytes, steps=steps, node_of_rank=self.node_of_rank)
            metrics |= replica_metrics(placements, [weight_bytes(stack) for stack in stacks])
        for name, value in metrics.items():
            trainer.record(name, value)

    def _fold(self) -> None:
        """Add what all ranks noted to the line and to the epoch. A collective, one reduction."""
        counts: Counts | None = None
        for placements, sent_FLE, dropped_FLE in self.forwards.take():
            here = count(
                sent_FLE.cpu().numpy()[:, :, None],
                placements,
                sources=[self.rank],
                world_size=self.world_size,
                dropped_LE=dropped_FLE.sum(0).cpu().numpy(),
            )
            counts = here if counts is None else counts.then(here)
        if counts is None:
            return
        if dist.is_initialized():
            flat = torch.from_numpy(counts.flat()).to(self.forwards.stacks[0].load_E.device)
            dist.all_reduce(flat)
            counts = counts.unflat(flat.cpu().numpy())
        window = Window.of(counts)
        self._line = self._line.then(window)
        self._epoch_load_LE = self._epoch_load_LE + window.load_LE

    def _empty(self) -> Window:
        stacks = self.forwards.stacks
        group = stacks[0].groups.ep_size if stacks else 1
        experts = stacks[0].num_experts if stacks else 0
        none_LE = np.zeros((len(stacks), experts), dtype=np.int64)
        return Window(
            none_LE,
            none_LE,
            np.zeros((0, len(stacks))),
            np.zeros((len(stacks), self.world_size, group), dtype=np.int64),
        )

    def state_dict(self) -> dict[str, Any]:
        """A collective."""
        if not self.names:
            return {}
        self._fold()
        return {
            "line": self._line.to_dict(),
            "line_began": self._line_began,
            "epoch_load": self._epoch_load_LE.tolist(),
            "lived": self._lived_LE.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.names:
            return
        self.forwards.take()
        self._line = Window.from_dict(state["line"], self._empty())
        self._line_began = state["line_began"]
        self._epoch_load_LE = np.array(state["epoch_load"], dtype=np.int64)
        self._lived_LE = np.array(state["lived"], dtype=bool)


def weight_bytes(stack: ExpertStack) -> int:
    """Of one copy of an expert of `stack`."""
    return sum(p.shape[1:].numel() * p.element_size() for p in stack.parameters.values())
