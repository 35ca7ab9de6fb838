"""Callbacks for load balancing: router bias, and a balance loss over the global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.experts.layer.losses import RouterPenalty, global_load
from toolkit.experts.layer.routing_log import take_loads
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer


class BiasBalancing(Callback):
    """Auxiliary-loss-free balancing: each step lowers the router bias of overloaded experts and raises the others'.

    b_e += rate * sign(mean load - load_e), with the loads of the global batch (Wang et al. 2024, arXiv 2408.15664,
    algorithm 1). Acts on routers made with `balance="bias"`.

    Args:
        rate: How much a bias changes in a step.
    """

    def __init__(self, *, rate: float = 1e-3):
        self.rate = rate

    def on_init(self, trainer: Trainer) -> None:
        self.layers = [layer for layer in trainer.experts.moe.values() if layer.router.bias is not None]
        self.cursors = [layer.expert_stack.log.cursor() for layer in self.layers]

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        for layer, counts_E in zip(self.layers, take_loads(self.cursors), strict=True):
            load_E = counts_E.to(trainer.run.device, torch.float32)
            mean = load_E.sum() / layer.router.num_choices
            bias = layer.router.bias
            assert bias is not None
            bias += self.rate * (mean - load_E).sign()


class WholeStepBalance(Callback):
    """Computes the balance loss over the global batch if gradients are accumulated, not over each micro-batch.

    The loss multiplies loads with probabilities, so it is no sum over micro-batches: the backward pass of the first one
    needs the loads of the last one. This callback counts loads in a forward pass of all micro-batches without
    gradients, which leaves the model's buffers as they were. Without it, each micro-batch (over all ranks) is balanced
    separately, which is cheaper and a slightly different loss.
    """

    def __init__(self, penalty: RouterPenalty):
        self.penalty = penalty

    @torch.no_grad()
    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        if len(micro_batches) == 1 or not self.penalty.layers or self.penalty.balance_weight == 0:
            return
        # A forward pass in training mode changes buffers, such as the running statistics of batch norm.
        before = {name: buffer.clone() for name, buffer in trainer.raw_model.named_buffers()}
        loads = []
        for index, batch in enumerate(micro_batches):
            trainer.seed_micro_batch(index)
            with trainer.run.accelerator.autocast():
                trainer.task.evaluate(trainer.raw_model, batch)
            loads.append(global_load(self.penalty.layers))
        self.penalty.step_load_LE = torch.stack(loads).sum(0)
        for name, buffer in trainer.raw_model.named_buffers():
            if name in before and before[name].shape == buffer.shape:  # not a cache that grew
                buffer.copy_(before[name])

    def on_before_optimizer_step(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.penalty.step_load_LE = None
