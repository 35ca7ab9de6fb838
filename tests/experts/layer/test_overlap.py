"""Overlap of the all-to-all with the shared expert and weight gradients: order of events, identical results."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.processes import run_distributed
from tests.experts.models import make_layer
from toolkit.experts.layer.moe_layer import MoE

DIM = 16
events: list[str] = []
"""Events of this process."""


def record_shared_expert(y: Tensor) -> None:
    events.append("shared expert")
    if y.requires_grad:
        y.register_hook(lambda _: events.append("shared expert"))


@contextmanager
def recorded_exchanges() -> Iterator[None]:
    """Record departures and arrivals of rows."""
    exchange = dist.all_to_all_single

    def recorded(result: Tensor, rows: Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        if args:  # numbers of rows are exchanged without sizes
            events.append("departed")
        work = exchange(result, rows, *args, async_op=async_op, **options)
        return SimpleNamespace(wait=lambda: events.append("arrived") or work.wait()) if async_op else work

    with mock.patch.object(dist, "all_to_all_single", recorded):
        yield


def step(layer: MoE) -> dict[str, Any]:
    """Return output, gradients, and the events of the forward and the backward pass."""
    rank = dist.get_rank()
    draws = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(20 + 7 * rank, DIM, generator=draws).requires_grad_()
    layer.zero_grad()
    with recorded_exchanges():
        events.clear()
        y_TD = layer(x_TD)
        forward = ", ".join(events)
        events.clear()
        y_TD.square().sum().backward()
        backward = ", ".join(events)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, **grads, "events": (forward, backward)}


def without_overlap(dispatcher: Any) -> Any:
    """Return a dispatcher that computes nothing while rows are in flight."""

    def receive(*args: Any, meanwhile: Any, **options: Any) -> Any:
        found = dispatcher.receive(*args, **options)
        meanwhile()
        return found

    return SimpleNamespace(receive=receive, send_back=dispatcher.send_back, placement=dispatcher.placement)


def steps_with_and_without_overlap(options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return steps with overlap, with overlap under anomaly detection, and without overlap."""
    layer = make_layer(DIM, 24, 8, 2, shared_expert=True, **options)
    layer.shared_expert.register_forward_hook(lambda _, __, y: record_shared_expert(y))
    layer.experts.register_forward_pre_hook(lambda *_: events.append("experts"))
    layer.experts.up.register_hook(lambda _: events.append("gradient of experts"))
    overlapped = step(layer)
    with torch.autograd.detect_anomaly():
        checked = step(layer)
    layer.expert_stack.dispatcher = without_overlap(layer.expert_stack.dispatcher)
    return overlapped, checked, step(layer)


FORWARD = "departed, shared expert, arrived, experts, departed, arrived"
BACKWARD = "departed, arrived, departed, gradient of experts, shared expert, arrived"


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "swiglu", "recompute": "selective", "capacity_factor": 0.8}, {"recompute": "full"}],
)
def test_all_to_all_overlaps_with_shared_expert_and_weight_gradients(options: dict[str, Any]) -> None:
    for overlapped, *others in run_distributed(steps_with_and_without_overlap, 2, options):
        backward = f"{FORWARD}, {BACKWARD}" if options.get("recompute") == "full" else BACKWARD
        assert overlapped["events"] == (FORWARD, backward)
        for other in others:
            assert overlapped.keys() == other.keys()
            for name in overlapped.keys() - {"events"}:
                assert torch.equal(overlapped[name], other[name]), name
