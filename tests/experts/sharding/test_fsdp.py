"""FSDP2: bytes of experts on a rank, precision, rows that cannot be sharded, skipped blocks, and replicas of shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from benchmarks.support.accelerators import make_accelerator
from benchmarks.support.processes import run_distributed
from tests.parity.models import RoutedExperts
from tests.support.equality import replicas_agree
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.ownership import local_rows
from toolkit.experts.parallel.replica_check import ReplicaCheck
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.accelerate.prepare import prepare


class Blocks(nn.Module):
    """Two blocks, of which a forward pass may skip the second, or call the first again as a third."""

    _no_split_modules = ("Linear",)

    def __init__(self, *, repeat: bool = False) -> None:
        super().__init__()
        blocks = [nn.Linear(3, 3) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks + blocks[:1] * repeat)
        self.depth = len(self.blocks)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x) * self.scale
        return x


def shard(model: nn.Module, fsdp_size: int | None = None, **options: Any) -> tuple[Accelerator, Any]:
    accelerator = make_accelerator("fsdp2", fsdp_size, cpu=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    prepare(accelerator, model, optimizer)
    return accelerator, optimizer


def train(depths: list[int], accumulation: int, fsdp_size: int | None, repeat: bool) -> None:
    """Train on micro-batches with these depths next to one process that has the model of rank 0."""
    torch.manual_seed(0)
    reference = Blocks(repeat=repeat).double()
    torch.manual_seed(dist.get_rank())
    model = Blocks(repeat=repeat).double()
    accelerator, optimizer = shard(model, fsdp_size, gradient_accumulation_steps=accumulation)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    batch = torch.arange(12, dtype=torch.float64).view(4, 3)
    for depth in depths:
        reference.depth = model.depth = depth
        (reference(batch).square().mean() / accumulation).backward()
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean())
        if accelerator.sync_gradients:
            optimizer.step()
            reference_optimizer.step()
            optimizer.zero_grad()
            reference_optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("world", "depths", "accumulation", "fsdp_size", "repeat"),
    [(4, [2, 2, 1, 2, 2, 1], 2, 2, False), (2, [3, 3, 3], 1, None, True)],
    ids=["block skipped by the last micro-batch", "block at two places"],
)
def test_blocks_equal_one_process(world: int, depths: list[int], accumulation: int, fsdp_size: Any, repeat: bool):
    run_distributed(train, world, depths, accumulation, fsdp_size, repeat)


def bytes_of_experts(ep_size: int) -> tuple[int, int]:
    """Return the bytes of all expert weights, and of weights, gradients and states of experts on this rank."""
    model = nn.Sequential(make_moe(8, 16, 8, 2), RoutedExperts(dim=8))
    accelerator = make_accelerator("fsdp2", cpu=True)
    experts = ExpertParallel(accelerator, ep_size=ep_size)
    everything = sum(p.nbytes for stack in expert_stacks(model).values() for p in stack.parameters.values())
    everything += sum(p.nbytes for p in model[1].experts.parameters())
    made_with = [p for name, p in model.named_parameters() if ".experts." in name]
    model, optimizer = experts.prepare(model, torch.optim.AdamW(model.parameters()))
    assert not any(p.nbytes for p in made_with), "the optimizer would hold them until all layers are read"
    accelerator.backward(model(torch.randn(4, 8)).sum())
    optimizer.step()
    parameters = [p for stack in experts.stacks.values() for p in stack.parameters.values()]
    states = [optimizer.optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
    here = [*parameters, *(p.grad for p in parameters), *states]
    return everything, sum(local_rows(tensor).nbytes for tensor in here)


@pytest.mark.parametrize(("world", "ep_size"), [(4, 2), (8, 2), (8, 4)])
def test_experts_gradients_and_states_are_sharded_over_all_ranks(world: int, ep_size: int):
    for everything, here in run_distributed(bytes_of_experts, world, ep_size):
        assert here == 4 * everything / world


def train_hsdp() -> bool:
    torch.manual_seed(dist.get_rank())
    model = Blocks()
    accelerator, optimizer = shard(model, fsdp_size=2)
    check = ReplicaCheck(model)
    for _ in range(2):
        accelerator.backward(model(torch.full((4, 3), 1.0 + dist.get_rank())).square().sum())
        check()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 3:
        model.blocks[1].weight.grad.to_local().mul_(2)
    with pytest.raises(UserError, match=r"gradients of 1 parameter\(s\), first 'blocks.1.weight', differ"):
        check.check(check.steps)
    return replicas_agree(model)


def test_gradients_that_differ_between_sets_of_shards_raise():
    assert run_distributed(train_hsdp, 4) == [True] * 4


class RoutedBlock(nn.Module):
    """A block in bfloat16 with a router in float32, as in models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.router(x.float()).softmax(-1).bfloat16()


def compare_two_types() -> None:
    torch.manual_seed(0)
    reference, model = nn.Sequential(RoutedBlock()), nn.Sequential(RoutedBlock())
    model.load_state_dict(reference.state_dict())
    shard(model)
    for each in (reference, model):
        each(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().sum().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def test_float32_router_in_a_bfloat16_block_equals_one_process():
    run_distributed(compare_two_types, 2)


def compare_bfloat16(ep_size: int) -> None:
    """Compare the first gradients with a model whose parameters are cast, as FSDP2 casts them."""
    torch.manual_seed(0)
    reference, model = (nn.Sequential(make_moe(8, 16, 4, 2), make_moe(8, 16, 4, 2)) for _ in range(2))
    model.load_state_dict(reference.state_dict())
    accelerator = make_accelerator("fsdp2", cpu=True, mixed_precision="bf16")
    x = torch.randn(8, 8)
    cast = {name: parameter.bfloat16() for name, parameter in reference.named_parameters()}
    functional_call(reference, cast, (x.bfloat16(),)).float().square().mean().backward()
    model, _ = ExpertParallel(accelerator, ep_size=ep_size).prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(x.chunk(dist.get_world_size())[dist.get_rank()]).float().square().mean())
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        rows = expert_stacks(model)[name[0]].placement.slots if ".experts." in name else None
        if rows is not None:
            expected = expected[list(rows[dist.get_rank() % ep_size])]
        found = parameter.grad.full_tensor()
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("ep_size", [1, 2])
def test_bfloat16_parameters_equal_one_process(ep_size: int):
    run_distributed(compare_bfloat16, 2, ep_size)


class OddExperts(nn.Module):
    """Experts with a dimension of 6, of 5, and none that 2 ranks divide."""

    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.randn(4, 5, 6)), nn.Parameter(torch.randn(4, 5))

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        each = torch.einsum("td,tkfd->tkf", hidden, self.up[ids]) + self.bias[ids]
        return nn.functional.pad((each * weights[..., None]).sum(1), (0, 1))


class OddLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), OddExperts()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return self.experts(x, ids, weights)


def compare_odd_experts() -> list[str]:
    torch.manual_seed(0)
    reference, model = OddLayer().double(), OddLayer().double()
    model.load_state_dict(reference.state_dict())
    accelerator = make_accelerator("fsdp2", cpu=True)
    model, optimizer = ExpertParallel(accelerator, ep_size=2).prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    reference_optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    x = torch.randn(8, 6, dtype=torch.float64)
    for _ in range(3):
        accelerator.backward(model(x.chunk(4)[dist.get_rank()]).square().mean())
        reference(x).square().mean().backward()
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    mine = [0, 1] if dist.get_rank() % 2 == 0 else [2, 3]
    found = dict(model.experts.named_parameters())
    for name, parameter in found.items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole, reference.experts.get_parameter(name)[mine], rtol=1e-10, atol=1e-12)
    return [name for name, parameter in found.items() if isinstance(parameter, DTensor)]


def test_rows_that_cannot_be_sharded_are_replicas():
    assert run_distributed(compare_odd_experts, 4) == [["up"]] * 4
