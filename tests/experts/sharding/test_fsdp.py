"""FSDP2: bytes of experts on a rank, mixed types, skipped blocks, and replicas of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from benchmarks.support.accelerators import make_accelerator
from benchmarks.support.families import tiny_config
from benchmarks.support.processes import run_distributed
from tests.parity.models import RoutedExperts
from tests.support.equality import replicas_agree
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.parallel.ownership import is_shard, local_rows
from toolkit.experts.parallel.replica_check import ReplicaCheck
from toolkit.experts.sharding.fsdp import ExpertShards
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.accelerate.prepare import prepare
from toolkit.integrations.transformers import causal_lm, experts_in_files


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
            for each in (optimizer, reference_optimizer):
                each.step()
                each.zero_grad()
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
    """Return the bytes of expert weights per rank, and of weights, gradients and states of experts on this rank."""
    model = nn.Sequential(make_moe(8, 16, 8, 2), RoutedExperts())
    accelerator = make_accelerator("fsdp2", cpu=True)
    experts = ExpertParallel(accelerator, ep_size=ep_size)
    weights = {name: p.nbytes for name, p in model.named_parameters() if ".experts." in name}
    whole = weights.pop("1.experts.up_bias")  # rows of 13 numbers, which 2 and 4 do not divide
    expected = sum(weights.values()) // dist.get_world_size() + whole // ep_size
    made_with = dict(model.named_parameters())
    model, optimizer = experts.prepare(model, torch.optim.AdamW(model.parameters()))
    assert not any(made_with[name].nbytes for name in weights), "the optimizer would hold them while layers are read"
    accelerator.backward(model(torch.randn(4, 8)).sum())
    optimizer.step()
    parameters = [p for stack in experts.stacks.values() for p in stack.parameters.values()]
    states = [optimizer.optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
    here = [*parameters, *(p.grad for p in parameters), *states]
    return expected, sum(local_rows(tensor).nbytes for tensor in here)


@pytest.mark.parametrize(("world", "ep_size"), [(4, 2), (8, 2), (8, 4)])
def test_experts_gradients_and_states_are_sharded_over_all_ranks(world: int, ep_size: int):
    for expected, here in run_distributed(bytes_of_experts, world, ep_size):
        assert here == 4 * expected


class LiveBytes(TorchDispatchMode):
    """The peak of the bytes of all tensors that operations returned and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._tensors = 0, WeakTensorKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in (local_rows(each) for each in tree_leaves(found) if isinstance(each, Tensor)):
            self._tensors[tensor] = None
        storages = [tensor.untyped_storage() for tensor in list(self._tensors) if not tensor.is_meta]
        self.peak = max(self.peak, sum({each.data_ptr(): each.nbytes() for each in storages}.values()))
        return found


def bytes_while_loading(folder: Path) -> tuple[int, int, int]:
    """Return the peak while experts are read from files and sharded, and the bytes of all shards and of a layer."""
    with experts_in_files():
        model = causal_lm(folder)
    with LiveBytes() as live:
        stacks = shard_experts(model, make_expert_groups(2), shards=ExpertShards())
    layers = [list(stack.parameters.values()) for stack in stacks.values()]
    assert all(is_shard(parameter) for layer in layers for parameter in layer)
    here = sum(local_rows(parameter).nbytes for layer in layers for parameter in layer)
    return live.peak, here, sum(parameter.nbytes for parameter in layers[0])


def test_rank_holds_its_shards_and_one_layer_while_loading(tmp_path: Path):
    causal_lm(tiny_config("qwen3_moe", num_hidden_layers=8)).save_pretrained(tmp_path)
    for peak, here, layer in run_distributed(bytes_while_loading, 4, tmp_path):
        assert here == 4 * layer
        assert here < peak < here + 2 * layer


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
