"""What is computed while rows travel between ranks: in which order things happen, and that no number changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import run_distributed
from toolkit.models.mlp import MLP
from toolkit.moe.layer import MoE, make_moe
from toolkit.parallel.groups import make_expert_groups

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
        if rows.is_floating_point():
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
    x_TD = torch.randn(20 + 7 * rank, DIM, generator=torch.Generator().manual_seed(rank)).requires_grad_()
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


def with_and_without_overlap(activation: Any, recompute: Any) -> tuple[dict[str, Any], ...]:
    """A step of a layer with a shared expert; the same where autograd looks for NaN; and where nothing is computed
    before rows have arrived."""
    torch.manual_seed(0)
    shared = Noted(MLP(DIM, 8, DIM))
    options: dict[str, Any] = {"activation": activation, "recompute": recompute, "shared_expert": shared}
    layer = make_moe(DIM, 24, 8, 2, groups=make_expert_groups(dist.get_world_size()), **options)
    nn.init.normal_(layer.router.weight)
    layer.experts.up.register_hook(lambda _: events.append("gradient of experts"))
    together = step(layer)
    with torch.autograd.detect_anomaly():
        watched = step(layer)
    dispatcher: Any = layer.expert_stack.dispatcher
    dispatch = dispatcher.dispatch

    def then_compute(x_TD: Tensor, ids_TK: Tensor, kept_TK: Tensor | None, meanwhile: Any) -> Any:
        arrived = dispatch(x_TD, ids_TK, kept_TK)
        meanwhile()
        return arrived

    dispatcher.dispatch = then_compute
    return together, watched, step(layer)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize(("activation", "recompute"), [("relu", "none"), ("swiglu", "selective"), ("relu", "full")])
def test_the_shared_expert_and_gradients_of_experts_are_computed_while_rows_travel(
    activation: str, recompute: str
) -> None:
    for together, *others in run_distributed(with_and_without_overlap, 2, activation, recompute):
        forward, backward = together["events"]
        assert forward == ["departed", "shared expert", "arrived", "departed"]
        again = [*forward] if recompute == "full" else []
        assert backward == [*again, "departed", "departed", "shared expert", "gradient of experts", "arrived"]
        for other in others:
            assert together.keys() == other.keys()
            for name in together.keys() - {"events"}:
                assert torch.equal(together[name], other[name]), name
