"""What is computed while rows travel between ranks: in which order things happen, and that no number changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.equality import relative_difference
from tests.support.helpers import run_distributed
from toolkit.experts.layer.dispatch.dispatch import AllToAllDispatcher
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
    dtype = layer.router.weight.dtype
    draws = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(20 + 7 * rank, DIM, dtype=dtype, generator=draws).requires_grad_()
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


class Deaf:
    """Begins to compute nothing before rows have arrived, and sends tokens as one chunk."""

    def __init__(self, dispatcher: AllToAllDispatcher):
        self.dispatcher, self.placement = dispatcher, dispatcher.placement

    def mix(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Any, *, kept_TK: Any, meanwhile: Any
    ) -> tuple[Tensor, Any]:
        rows, arrived = self.dispatcher.dispatch(x_TD, ids_TK, weights_TK, kept_TK)
        y_TD = self.dispatcher.combine(experts()(rows, arrived.rows_per_slot), arrived)
        meanwhile()
        return y_TD, [arrived.plan]


def with_and_without_overlap(
    activation: Any, recompute: Any, chunks: int, capacity: float | None, dtype: torch.dtype
) -> tuple[dict[str, Any], ...]:
    """A step of a layer with a shared expert; the same where autograd looks for NaN; and where nothing is computed
    while rows travel."""
    torch.manual_seed(0)
    shared = Noted(MLP(DIM, 8, DIM))
    options: dict[str, Any] = {"activation": activation, "recompute": recompute, "shared_expert": shared}
    options["capacity_factor"] = capacity
    layer = make_moe(
        DIM, 24, 8, 2, groups=make_expert_groups(dist.get_world_size(), dispatch_chunks=chunks), **options
    ).to(dtype)
    nn.init.normal_(layer.router.weight)
    layer.experts.register_forward_pre_hook(lambda *_: events.append("experts"))
    layer.experts.up.register_hook(lambda _: events.append("gradient of experts"))
    together = step(layer)
    with torch.autograd.detect_anomaly():
        watched = step(layer)
    dispatcher: Any = Deaf(layer.expert_stack.dispatcher)
    layer.expert_stack.dispatcher = dispatcher
    return together, watched, step(layer)


ONE_CHUNK = (
    "departed, shared expert, arrived, experts, departed",
    "departed, departed, gradient of experts, shared expert, arrived",
)
TWO_CHUNKS = (
    # The rows of both chunks depart; those of the first return while the experts compute the second.
    "departed, departed, shared expert, arrived, experts, departed, arrived, experts, departed, arrived, arrived",
    "departed, departed, arrived, departed, arrived, departed, gradient of experts, shared expert, arrived, arrived",
)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize(
    ("activation", "recompute", "chunks", "capacity", "dtype", "tolerance"),
    [
        ("relu", "none", 1, None, torch.float32, 0.0),
        ("swiglu", "selective", 1, None, torch.float32, 0.0),
        ("relu", "full", 1, None, torch.float32, 0.0),
        ("swiglu", "selective", 2, None, torch.float32, 1e-5),
        ("relu", "none", 2, None, torch.float64, 1e-12),
        ("relu", "none", 2, 0.8, torch.float64, 1e-12),
        ("swiglu", "full", 2, 0.8, torch.float64, 1e-12),
    ],
)
def test_experts_the_shared_expert_and_gradients_are_computed_while_rows_travel(
    activation: str, recompute: str, chunks: int, capacity: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    """Gradients of the experts' weights are added up chunk by chunk, so only one chunk gives the same bits."""
    expected = ONE_CHUNK if chunks == 1 else TWO_CHUNKS
    case = (activation, recompute, chunks, capacity, dtype)
    for together, *others in run_distributed(with_and_without_overlap, 2, *case):
        forward, backward = together["events"]
        assert ", ".join(forward) == expected[0]
        again = [expected[0]] if recompute == "full" else []
        assert ", ".join(backward) == ", ".join([*again, expected[1]])
        for other in others:
            assert together.keys() == other.keys()
            for name in together.keys() - {"events"}:
                if tolerance:
                    assert relative_difference(together[name], other[name]) < tolerance, name
                else:
                    assert torch.equal(together[name], other[name]), name
