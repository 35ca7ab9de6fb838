"""What is computed while rows travel between ranks: in which order things happen, and that no number changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.helpers import run_distributed
from toolkit.experts.layer.dispatcher import TokenDispatcher
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.train.models.mlp import MLP

DIM = 16
events: list[str] = []
"""Of this process."""


class Noted(nn.Module):
    """Notes when `module` computes, forward and backward."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        events.append("shared expert")
        y: Tensor = self.module(x)
        if y.requires_grad:
            y.register_hook(lambda _: events.append("shared expert"))
        return y


class NotedWork:
    """Notes when somebody waits for `work`."""

    def __init__(self, work: dist.Work):
        self.work = work

    def wait(self) -> Any:
        events.append("arrived")
        return self.work.wait()


@contextmanager
def noted_exchanges() -> Iterator[None]:
    """Notes when rows depart and arrive."""
    exchange = dist.all_to_all_single

    def noted(result: Tensor, rows: Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        if args:  # numbers of rows are exchanged without sizes
            events.append("departed")
        work = exchange(result, rows, *args, async_op=async_op, **options)
        return NotedWork(work) if async_op else work

    dist.all_to_all_single = noted
    try:
        yield
    finally:
        dist.all_to_all_single = exchange


def step(layer: MoE) -> dict[str, Any]:
    """Output, gradients, and the events of forward and backward, of a step whose input has a gradient."""
    rank = dist.get_rank()
    draws = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(20 + 7 * rank, DIM, generator=draws).requires_grad_()
    layer.zero_grad()
    with noted_exchanges():
        events.clear()
        y_TD = layer(x_TD)
        forward = list(events)
        events.clear()
        y_TD.square().sum().backward()
        backward = list(events)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, **grads, "events": (forward, backward)}


class Sequential:
    """A dispatcher that computes nothing while rows are in flight."""

    def __init__(self, dispatcher: TokenDispatcher):
        self.dispatcher, self.combine, self.placement = dispatcher, dispatcher.combine, dispatcher.placement

    def dispatch(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, kept_TK: Any, meanwhile: Any
    ) -> tuple[Tensor, Any]:
        found = self.dispatcher.dispatch(x_TD, ids_TK, weights_TK, kept_TK)
        meanwhile()
        return found


def with_and_without_overlap(activation: Any, recompute: Any, capacity: float | None) -> tuple[dict[str, Any], ...]:
    """A step of a layer with a shared expert; the same where autograd looks for NaN; and where nothing is computed
    while rows travel."""
    torch.manual_seed(0)
    shared = Noted(MLP(DIM, 8, DIM))
    options: dict[str, Any] = {"activation": activation, "recompute": recompute, "shared_expert": shared}
    options["capacity_factor"] = capacity
    layer = make_moe(DIM, 24, 8, 2, groups=make_expert_groups(dist.get_world_size()), **options)
    nn.init.normal_(layer.router.weight)
    layer.experts.register_forward_pre_hook(lambda *_: events.append("experts"))
    layer.experts.up.register_hook(lambda _: events.append("gradient of experts"))
    together = step(layer)
    with torch.autograd.detect_anomaly():
        watched = step(layer)
    dispatcher: Any = Sequential(layer.expert_stack.dispatcher)
    layer.expert_stack.dispatcher = dispatcher
    return together, watched, step(layer)


FORWARD = "departed, shared expert, arrived, experts, departed, arrived"
BACKWARD = "departed, arrived, departed, gradient of experts, shared expert, arrived"


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize(
    ("activation", "recompute", "capacity"),
    [("relu", "none", None), ("swiglu", "selective", 0.8), ("relu", "full", None)],
)
def test_all_to_all_overlaps_with_the_shared_expert_and_weight_gradients_bitwise_identically(
    activation: str, recompute: str, capacity: float | None
) -> None:
    for together, *others in run_distributed(with_and_without_overlap, 2, activation, recompute, capacity):
        forward, backward = together["events"]
        assert ", ".join(forward) == FORWARD
        assert ", ".join(backward) == ", ".join([FORWARD, BACKWARD] if recompute == "full" else [BACKWARD])
        for other in others:
            assert together.keys() == other.keys()
            for name in together.keys() - {"events"}:
                assert torch.equal(together[name], other[name]), name
