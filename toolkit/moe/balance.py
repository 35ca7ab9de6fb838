"""Callbacks that steer how tokens spread over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from toolkit.callbacks.base import Callback
from toolkit.moe.layer import MoE, moe_layers
from toolkit.moe.losses import RouterPenalty, global_load
from toolkit.parallel.groups import sum_over_ranks

if TYPE_CHECKING:
    from toolkit.task import Batch
    from toolkit.trainer import Trainer


class LoadSince:
    """Routed copies per expert since the last reading, over all ranks, without resetting the layers' counters."""

    def __init__(self, layers: list[MoE]):
        self.layers = layers
        self._before = self._running() if layers else torch.zeros(0)

    def _running(self) -> Tensor:
        return torch.stack([layer.load_E for layer in self.layers])

    def take(self) -> Tensor:
        """int64 (layers, E), and begin anew. A collective."""
        now = self._running()
        since = now - self._before.to(now.device)
        self._before = now
        return sum_over_ranks(since)


class BiasBalancing(Callback):
    """Balance without a loss: after each step an overloaded expert's bias falls and an underloaded one's rises.

    b_e += rate * sign(mean load - load_e), with the loads of the whole step over all ranks and micro-batches
    (Wang et al. 2024, arXiv 2408.15664, algorithm 1). Needs routers made with `bias_balancing`.
    """

    def __init__(self, model: nn.Module, *, rate: float = 1e-3):
        self.layers = [layer for layer in moe_layers(model).values() if layer.router.bias is not None]
        self.since = LoadSince(self.layers)
        self.rate = rate

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        if not self.layers:
            return
        load_LE = self.since.take().to(trainer.run.device, torch.float32)
        for layer, load_E in zip(self.layers, load_LE, strict=True):
            mean = load_E.sum() / layer.router.num_choices
            layer.router.bias += self.rate * (mean - load_E).sign()


class WholeStepBalance(Callback):
    """Makes the balance loss that of the whole step where gradients are accumulated.

    The loss multiplies loads with probabilities, so it cannot be added up from micro-batches, and the first
    micro-batch's backward already needs the loads of the last. This callback runs the step's forward passes once more,
    without gradients, to count. Without it each micro-batch (over all ranks) is balanced by itself: cheaper, and a
    slightly different loss.
    """

    def __init__(self, penalty: RouterPenalty):
        self.penalty = penalty

    @torch.no_grad()
    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        penalty = self.penalty
        linear = not penalty.layers or penalty.balance_weight == 0 or penalty.balance_scope != "global"
        if len(micro_batches) == 1 or linear:
            return
        loads = []
        for index, batch in enumerate(micro_batches):
            trainer.seed_micro_batch(index)
            with trainer.run.accelerator.autocast():
                trainer.task.evaluate(trainer.raw_model, batch)
            loads.append(global_load(self.penalty.layers))
        self.penalty.step_load_LE = torch.stack(loads).sum(0)

    def on_before_optimizer_step(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.penalty.step_load_LE = None
