"""FSDP2 over sets of ranks (HSDP), piece by piece; that it learns the same is shown in `tests/test_parity.py`."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.support.processes import run_distributed
from tests.support.equality import replicas_agree
from toolkit.errors import UserError
from toolkit.experts.compat import timeout_of
from toolkit.experts.parallel import groups
from toolkit.experts.parallel.replica_check import ReplicaCheck
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.integrations.accelerate.prepare import prepare


def sharded(accumulation: int, fsdp_size: int) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """Two blocks and a head, which each rank begins with other weights."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(dist.get_rank())
    blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    prepare(accelerator, model, optimizer, dense="fsdp2", fsdp_size=fsdp_size)
    return accelerator, model, optimizer


class Skipping(nn.Module):
    """Two blocks, of which the second may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.depth = 2

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x


def train(depths: tuple[int, ...], accumulation: int, fsdp_size: int | None, *, twice: bool) -> str | list[Tensor]:
    """The weights after micro-batches of so many blocks, of which one may be in two places, or the error of a step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = Skipping().double()
    if twice:
        model.blocks.append(model.blocks[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    several = accelerator.num_processes > 1
    prepare(accelerator, model, optimizer, dense="fsdp2", fsdp_size=fsdp_size if several else None)
    batch = torch.arange(12, dtype=torch.float64).view(4, 3)[accelerator.process_index :: accelerator.num_processes]
    for model.depth in depths:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
        if accelerator.sync_gradients:
            try:
                optimizer.step()
            except UserError as error:
                return f"with depth {model.depth}: {error}"
            optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def test_block_that_only_the_last_micro_batch_skips_raises_or_learns_as_on_one_process():
    work = partial(train, (2, 2, 1, 2, 2, 1), 2, 2, twice=False)
    (expected,) = run_distributed(work, 1)
    for got in run_distributed(work, 4):
        if isinstance(got, str):  # before torch 2.15, which averages these gradients
            assert got.startswith("with depth 1: fsdp_size: blocks.1 was used by a micro-batch and not by the last one")
        else:
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_a_block_in_two_places_is_one_unit_and_learns_as_on_one_process():
    work = partial(train, (3, 3, 3), 1, None, twice=True)
    (expected,) = run_distributed(work, 1)
    for found in run_distributed(work, 2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def two_sets() -> dict[str, Any]:
    with mock.patch.object(groups, "timeout_of", return_value=timedelta(seconds=77)):
        accelerator, model, optimizer = sharded(accumulation=3, fsdp_size=2)
    found: dict[str, Any] = {"agrees at first": replicas_agree(model)}
    head = model[1].weight
    assert isinstance(head, DTensor)
    mesh = head.device_mesh
    found["shape"] = tuple(head.to_local().shape)
    found["groups"] = [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(2)]
    found["time-outs"] = [timeout_of(mesh.get_group(dim)).total_seconds() for dim in range(2)]

    reductions = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        if group is mesh.get_group(0):
            reductions.append(tensor.numel())
        return all_reduce(tensor, *args, group=group, **options)

    check = ReplicaCheck(model)
    with mock.patch.object(dist, "all_reduce", counting):
        for micro in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((4, 3), 1.0 + dist.get_rank() + micro)).square().sum())
            if accelerator.sync_gradients:
                found.setdefault("reductions", []).append(len(reductions))
                ExpertSync(model.parameters()).clip(model.parameters(), 0.1)
                check()
                optimizer.step()
                optimizer.zero_grad()
                reductions.clear()
    found["agrees at last"] = replicas_agree(model)
    # An average of weights, and a gradient that one rank has changed.
    average = nn.Parameter(head.detach().clone())
    with torch.no_grad():
        average.lerp_(head, 0.5)
    found["average"] = torch.equal(average.to_local(), head.to_local())
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 3:
        head.grad.to_local().mul_(2)
    with pytest.raises(UserError) as drift:
        check.check(check.steps)
    found["drift"] = str(drift.value)
    return found


def test_two_sets_of_two_ranks_hold_the_shards_and_meet_once_a_step():
    for rank, found in enumerate(run_distributed(two_sets, 4)):
        assert found["agrees at first"], "sets began with other weights"
        assert found["agrees at last"]
        assert found["shape"] == (1, 3)
        assert found["groups"] == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
        assert found["time-outs"] == [77, 77], "not those of the world's group"
        assert found["reductions"] == [1, 1], "one for each step, not for each micro-batch"
        assert found["average"]
        assert "gradients of 1 parameter(s), first '1.weight', differ" in found["drift"]


class Routed(nn.Module):
    """In bfloat16 with a router in float32, as transformers has blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.router(x.float()).softmax(-1).bfloat16()


def shard_two_types() -> tuple[list[Tensor], list[Tensor]]:
    """Gradients as fully sharded and as on one process."""
    torch.manual_seed(0)
    alone, model = nn.Sequential(Routed()), nn.Sequential(Routed())
    model.load_state_dict(alone.state_dict())
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    accelerator = Accelerator(cpu=True)
    prepare(accelerator, model, torch.optim.AdamW(model.parameters()), dense="fsdp2")
    for each in (alone, model):
        each(x).float().square().sum().backward()
    grads = [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]
    return grads, [parameter.grad for parameter in alone.parameters()]  # type: ignore[misc]


def test_a_router_in_float32_is_gathered_apart_from_a_block_in_bfloat16():
    for grads, expected in run_distributed(shard_two_types, 2):
        assert [grad.dtype for grad in grads] == [torch.bfloat16] * 2 + [torch.float32] * 2
        torch.testing.assert_close(grads, expected)
