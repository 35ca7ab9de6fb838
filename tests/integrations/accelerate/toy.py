"""A toy MoE model and its training loop on Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.support.accelerators import make_accelerator
from tests.parity.data import BATCH, rank_and_world, unequal_share
from tests.parity.layouts import place
from tests.parity.models import DIM, Block, RoutedExperts
from tests.parity.outcome import Rows, gathered, rows_by_id
from toolkit.errors import UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.sharding.shard import PlacementOf
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

MIGRATING = ReplanOptions(planner="lpt", every=2, guarded=False)


class Toy(nn.Module):
    """Maps (B, 5) to (B, 3) through two MoE blocks, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, DIM)
        self.blocks = nn.ModuleList([Block(RoutedExperts()), Block(RoutedExperts())])
        self.head = nn.Linear(DIM, 3)
        self.skipped: tuple[int, ...] = ()
        """Blocks that the forward pass skips, as in LayerDrop."""
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return self.head(x)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02)


def expert_adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for name, p in model.named_parameters() if ".experts." in name], lr=0.02)


def non_expert_adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for name, p in model.named_parameters() if ".experts." not in name], lr=0.05)


def placement_of(name: str) -> PlacementOf:
    return lambda _, experts, ranks: place(name, experts, ranks)


def samples(step: int = 0) -> Tensor:
    """Return this rank's share of the samples of a step, an unequal one on more than two ranks."""
    x = torch.randn(BATCH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return unequal_share(x, *rank_and_world())


class ToyLoop:
    """A training loop whose losses and gradients do not depend on the world size.

    `schedule` is the learning rate factor of the first optimizer by step, `options` are arguments of `ExpertParallel`.
    """

    def __init__(
        self,
        *make_optimizers: Callable[[Any], Optimizer],
        model: nn.Module | None = None,
        accelerator: Accelerator | None = None,
        placement: str = "contiguous",
        schedule: Callable[[int], float] | None = None,
        dense: str = "ddp",
        **options: Any,
    ):
        self.raw: Any = Toy() if model is None else model
        self.accelerator = accelerator or make_accelerator(dense, cpu=True)
        self.experts = ExpertParallel(self.accelerator, placement=placement_of(placement), **options)
        optimizers = [make(self.raw) for make in make_optimizers or (sgd,)]
        schedulers = [] if schedule is None else [LambdaLR(optimizers[0], schedule)]
        self.model, *prepared = self.experts.prepare(self.raw, *optimizers, *schedulers)
        self.optimizers, self.schedulers = prepared[: len(optimizers)], prepared[len(optimizers) :]

    def backward(self, x: Tensor) -> None:
        self.accelerator.backward(self.model(x).square().sum() * self.accelerator.num_processes / BATCH)

    def train(self, steps: Iterable[int], max_norm: float | None = None, clip: Any = None) -> list[Tensor]:
        """Train, and return the gradient norms if `max_norm` is given. `clip` replaces Accelerate's clipping."""
        norms = []
        for step in steps:
            self.backward(samples(step))
            if max_norm is not None:
                norms.append((clip or self.accelerator.clip_grad_norm_)(self.model.parameters(), max_norm))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()
        return norms

    def weights(self) -> Rows:
        """Return the weights of this rank. Rows of experts have a name each, equal for replicas."""
        return weights_of(self.raw)


def weights_of(model: nn.Module) -> Rows:
    return gathered(rows_by_id(model, lambda p: p.detach()))


def error_of(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the message of the UserError of a call, "" if it raises none."""
    try:
        call(*args, **options)
    except UserError as error:
        return str(error)
    return ""
