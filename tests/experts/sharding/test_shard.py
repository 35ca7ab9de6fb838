"""Sharded experts train like one process whatever ranks had before, whatever wraps the model and reads beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.equality import in_float64
from tests.support.helpers import run_distributed
from toolkit import experts
from toolkit.errors import UserError
from toolkit.experts.parallel import collectives
from toolkit.experts.sharding.join import join_forwards
from toolkit.experts.state.state_dict import whole_state_dict

EXPERTS, DIM, TOKENS, STEPS = 4, 6, 16, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 8) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, DIM) * 8**-0.5)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            out = (hidden[token] @ self.up[expert]).tanh() @ self.down[expert]
            outputs = outputs.index_add(0, token, out * weights[token, choice, None])
        return outputs


class Block(nn.Module):
    """Adds the usual auxiliary loss, which reads `num_experts` beside the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(-1)
        weights, ids = probabilities.topk(2)
        return x + self.experts(x, ids, weights), self.experts.num_experts * probabilities.square().mean()


class WithLoss(nn.Module):
    """A module that holds the model and computes its loss, such as a LightningModule."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y, auxiliary = self.model(x)
        return y.square().mean() + 0.1 * auxiliary


def train(ep_size: int, replicas: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this rank's part of each batch, with a model that every rank draws differently."""
    with in_float64():
        rank, world = collectives.rank(), collectives.world_size()
        torch.manual_seed(rank)
        model = Block()
        rows = [[*range(EXPERTS)[at::ep_size]] for at in range(ep_size)]
        if replicas:
            rows = [[*row, (row[0] + 1) % EXPERTS] for row in rows]
        placement = experts.ExpertPlacement(tuple(map(tuple, rows)))
        experts.shard_experts(model, experts.make_expert_groups(ep_size), placement=lambda *_: placement)
        sync = experts.ExpertSync(model.parameters())
        loss_of = WithLoss(model)
        loss_of = DistributedDataParallel(loss_of) if world > 1 else loss_of
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        draws, losses = torch.Generator().manual_seed(9), []
        for step in range(1, STEPS + 1):
            batch = torch.randn(TOKENS, DIM, generator=draws, dtype=torch.float64)
            loss = loss_of(batch.chunk(world)[rank])
            loss.backward()
            sync.before_clip()
            sync.clip(model.parameters(), 0.1)
            optimizer.step()
            sync.after_step(step, optimizer)
            optimizer.zero_grad()
            losses.append(sum(collectives.gather_objects(loss.item())) / world)
        return losses, whole_state_dict(model)


@pytest.fixture(scope="module")
def one_process() -> tuple[list[float], dict[str, Tensor]]:
    return run_distributed(train, 1, 1, False)[0]


@pytest.mark.parametrize(
    ("world_size", "ep_size", "replicas"), [(2, 2, False), (2, 2, True), (4, 2, True), (4, 4, False)]
)
def test_training_with_differently_seeded_ranks_equals_rank_0_alone(
    world_size: int, ep_size: int, replicas: bool, one_process: tuple[list[float], dict[str, Tensor]]
):
    losses, weights = run_distributed(train, world_size, ep_size, replicas)[0]
    assert losses == pytest.approx(one_process[0], rel=1e-10)
    assert weights.keys() == one_process[1].keys()
    for name, expected in one_process[1].items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("place", ["router", "moe", "view"])
def test_table_shared_with_the_router_of_any_layer_raises(place: str):
    if place == "moe":
        layer = experts.make_moe(DIM, 8, EXPERTS, 2)
        model: Any = nn.Sequential(layer)
        layer.router.table = layer.experts.up
    else:
        model = Block()
        table = model.experts.up
        model.gate.table = nn.Parameter(table.data) if place == "view" else table
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(UserError, match=r"share a parameter with '.*(gate|router)\.table'"):
        experts.shard_experts(model, experts.make_expert_groups(1))
    assert [dict(vars(module)) for module in model.modules()] == before


def join_with_weights_of(dtype: torch.dtype) -> dict[str, Any]:
    model = Block()
    experts.shard_experts(model, experts.make_expert_groups(2))
    outputs = []
    stacks = [model.experts.expert_stack]
    with join_forwards([model.experts], stacks):
        for _ in range(1 + 2 * dist.get_rank()):
            hidden = torch.randn(3, DIM)
            outputs.append(model.experts(hidden, torch.tensor([[0, 3]] * 3), torch.ones(3, 2, dtype=dtype)))
    return {"calls": len(outputs)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_join_serves_routing_weights_of_another_dtype(dtype: torch.dtype):
    assert [found["calls"] for found in run_distributed(join_with_weights_of, 2, dtype)] == [1, 3]


def test_shard_experts_of_a_model_in_eval_mode_counts_forward_passes_with_gradients():
    model = nn.ModuleList([Block(), experts.make_moe(DIM, 8, EXPERTS, 2)]).eval()
    stacks = experts.shard_experts(model)
    for block in model:
        block(torch.randn(TOKENS, DIM))
        with torch.no_grad():
            block(torch.randn(TOKENS, DIM))
    assert [int(stack.log.load_E.sum()) for stack in stacks.values()] == [2 * TOKENS, 2 * TOKENS]
