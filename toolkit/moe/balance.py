"""Callbacks that watch and steer how tokens spread over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.callbacks.base import Callback
from toolkit.moe.layer import MoE, moe_layers
from toolkit.moe.losses import RouterPenalty, global_load

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

    def peek(self) -> Tensor:
        """int64 (layers, E). A collective."""
        now = self._running()
        since = now - self._before.to(now.device)
        if dist.is_initialized():
            dist.all_reduce(since)
        return since

    def restore(self, half: Tensor) -> None:
        """Take up a window that a checkpoint cut in two: rank 0 carries what all ranks had counted."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._before = self._before - half.to(self._before.device)

    def take(self) -> Tensor:
        """`peek`, and begin a new window."""
        since = self.peek()
        self._before = self._running()
        return since


class ExpertLoad(Callback):
    """Records on each line of metrics how the line's tokens spread over experts; one small reduction per line.

    `moe/load/<layer>`: the fraction of routed copies of each expert. Over all layers: `moe/max_load_over_mean` (1 when
    balanced; worst layer), `moe/min_load_over_mean`, `moe/load_entropy` (1 when balanced; mean over layers),
    and `moe/dead_experts`, those with less than 1 % of the copies. All describe what the router did, not where experts
    live. The result `min_expert_load` is the smallest fraction over the last whole epoch.
    """

    def __init__(self, model: nn.Module):
        layers = moe_layers(model)
        self.names = [name or "moe" for name in layers]
        self.since_line = LoadSince(list(layers.values()))
        self.since_epoch = LoadSince(list(layers.values()))

    def on_step_end(self, trainer: Trainer) -> None:
        if self.names and trainer.state.step % trainer.batches.steps_per_epoch == 0:
            load_LE = self.since_epoch.take().double()
            trainer.results["min_expert_load"] = (load_LE / load_LE.sum(1, keepdim=True)).min().item()
        if not trainer.at_log_step or not self.names:
            return
        load_LE = self.since_line.take().double().cpu()
        total = load_LE.sum(1, keepdim=True)
        if not total.all():
            return
        fraction_LE = load_LE / total
        experts = fraction_LE.shape[1]
        for name, fraction_E in zip(self.names, fraction_LE, strict=True):
            trainer.record(f"moe/load/{name}", fraction_E.tolist())
        entropy_L = torch.special.entr(fraction_LE).sum(1) / torch.tensor(float(max(2, experts))).log()
        trainer.record("moe/max_load_over_mean", fraction_LE.max().item() * experts)
        trainer.record("moe/min_load_over_mean", fraction_LE.min().item() * experts)
        trainer.record("moe/load_entropy", entropy_L.mean().item())
        trainer.record("moe/dead_experts", int((fraction_LE < 0.01).sum()))

    def state_dict(self) -> dict[str, Any]:
        if not self.names:
            return {}
        return {"since_line": self.since_line.peek().tolist(), "since_epoch": self.since_epoch.peek().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.names:
            self.since_line.restore(torch.tensor(state["since_line"]))
            self.since_epoch.restore(torch.tensor(state["since_epoch"]))


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
            layer.router.bias += self.rate * (load_E.mean() - load_E).sign()


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
        if len(micro_batches) == 1 or not self.penalty.layers or self.penalty.balance_weight == 0:
            return
        loads = []
        for index, batch in enumerate(micro_batches):
            trainer.seed_micro_batch(index)
            with trainer.run.accelerator.autocast():
                trainer.task.evaluate(trainer.raw_model, batch)
            loads.append(global_load(self.penalty.layers))
        self.penalty.step_load_LE = torch.stack(loads).sum(0)
