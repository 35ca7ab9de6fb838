"""Layers of other layouts, adapted for `ExpertParallel`, learn the same on one and two processes as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from tests.support.placements import by_slot
from toolkit.errors import UserError
from toolkit.experts.parallel import collectives
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.adapt import batched_experts, sorted_experts, stack_experts, unstack_experts
from toolkit.experts.sharding.shard import shard_experts
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

EXPERTS, DIM, WIDTH, K, STEPS = 4, 6, 5, 2, 3


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


class Layer(nn.Module):
    """A router and experts, with a forward of the other kind until `rewritten`."""

    rewritten = False

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts: Any = self.make()

    def make(self) -> nn.Module:
        raise NotImplementedError

    def rewrite(self) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return x + (self.experts(x, ids, weights) if self.rewritten else self.as_written(x, weights, ids))

    def as_written(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class InAList(Layer):
    def make(self) -> nn.Module:
        return nn.ModuleList([FeedForward() for _ in range(EXPERTS)])

    def rewrite(self) -> None:
        self.experts = stack_experts(self.experts)

    def as_written(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = (ids == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return out


class Grouped(nn.Module):
    """Called with rows that are sorted by expert, and their number by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, DIM, WIDTH))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        parts = x.split(counts.tolist())
        return torch.cat([F.silu(part @ self.w1[e].T) @ self.w2[e].T for e, part in enumerate(parts)])


class Flat(Grouped):
    """The same with tables that have the rows of all experts one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(self.w1.data.flatten(0, 1))
        self.w2 = nn.Parameter(self.w2.data.flatten(0, 1))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        w1, w2 = self.w1.view(self.num_experts, WIDTH, DIM), self.w2.view(self.num_experts, DIM, WIDTH)
        parts = x.split(counts.tolist())
        return torch.cat([F.silu(part @ w1[e].T) @ w2[e].T for e, part in enumerate(parts)])


class SortedRows(Layer):
    kind: type[nn.Module] = Grouped

    def make(self) -> nn.Module:
        return self.kind()

    def rewrite(self) -> None:
        sorted_experts(self.experts)

    def as_written(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        rows = self.experts(x[order // K], ids.flatten().bincount(minlength=EXPERTS))
        return torch.zeros_like(x).index_add(0, order // K, rows * weights.flatten()[order, None])


class FlatTables(SortedRows):
    kind = Flat


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("ecd,edf->ecf", x, self.gate_up).chunk(2, -1)
        return torch.einsum("ecf,efd->ecd", F.silu(gate) * up, self.down)


class GatedEinsum(Layer):
    """Each expert computes all tokens, most of them with a weight of 0."""

    def make(self) -> nn.Module:
        return Einsum()

    def rewrite(self) -> None:
        batched_experts(self.experts)

    def as_written(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        gates = torch.zeros(len(x), EXPERTS).scatter(1, ids, weights)
        return torch.einsum("te,etd->td", gates, self.experts(x.expand(EXPERTS, *x.shape)))


class WeightsBeforeIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, DIM))

    def forward(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return (torch.einsum("td,tkdf->tkf", x, self.up[chosen]).tanh() * scores[..., None]).sum(1)


class AnotherOrder(Layer):
    def make(self) -> nn.Module:
        return WeightsBeforeIds()

    def rewrite(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return x + self.experts(x, chosen=ids, scores=weights)


LAYERS: list[type[Layer]] = [InAList, SortedRows, FlatTables, GatedEinsum, AnotherOrder]


def placed(_layer: str, _experts: int, ranks: int) -> ExpertPlacement:
    """Experts elsewhere than in order."""
    return by_slot([1, 3, 2, 0], ranks)


def batches(step: int) -> Tensor:
    return torch.randn(8, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def build(kind: type[Layer]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), kind())


def learn(model: Any, optimizer: Any, backward: Callable[[Tensor], Any], rows: slice) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(batches(step)[rows]).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def learn_all(spread: bool) -> list[tuple[list[float], dict[str, Tensor]]]:
    """As written on one process, or adapted and sharded."""
    found = []
    with in_float64():
        for kind in LAYERS:
            model: Any = build(kind)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
            if not spread:
                losses = learn(model, optimizer, Tensor.backward, slice(None))
                found.append((losses, dict(model.state_dict())))
                continue
            layer: Any = model[1]
            layer.rewrite()
            layer.rewritten = True
            accelerator = Accelerator(cpu=True)
            world, rank = accelerator.num_processes, accelerator.process_index
            parallel = ExpertParallel(accelerator, placement=placed)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            wrapped, optimizer = parallel.prepare(model, optimizer)
            losses = learn(wrapped, optimizer, accelerator.backward, slice(rank, None, world))
            found.append((losses, whole_state_dict(model)))
    return found


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[float], dict[str, Tensor]]]:
    return run_distributed(learn_all, 1, False)[0]


@pytest.mark.parametrize("world", [1, 2])
def test_adapted_layer_learns_as_before(world: int, expected: list[tuple[list[float], dict[str, Tensor]]]):
    ranks = run_distributed(learn_all, world, True)
    for number, kind in enumerate(LAYERS):
        losses, weights = expected[number]
        found = torch.tensor([rank[number][0] for rank in ranks], dtype=torch.float64).mean(0)
        assert found.tolist() == pytest.approx(losses, rel=IN_FLOAT64)
        assert losses[-1] != pytest.approx(losses[0])
        saved = ranks[0][number][1]
        if kind is InAList:
            names = [name.partition("1.experts.0.")[2] for name in weights if ".experts.0." in name]
            for name in names:
                rows = [weights.pop(f"1.experts.{expert}.{name}") for expert in range(EXPERTS)]
                weights[f"1.experts.{name.replace('.', '_')}"] = torch.stack(rows)
        assert saved.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(saved[name], value, rtol=IN_FLOAT64, atol=1e-12)


def test_stack_experts_loads_the_state_of_the_list():
    written, other = build(InAList), build(InAList)
    other[1].rewrite()
    other[1].rewritten = True
    for parameter in written.parameters():
        parameter.data = torch.randn_like(parameter)
    other.load_state_dict(written.state_dict())
    torch.testing.assert_close(other(torch.ones(3, DIM)), written(torch.ones(3, DIM)))
    assert copy.deepcopy(other)(torch.ones(3, DIM)).equal(other(torch.ones(3, DIM)))


def test_unstack_experts_writes_what_the_list_reads():
    written, other = build(InAList), build(InAList)
    other[1].rewrite()
    other[1].rewritten = True
    for parameter in other.parameters():
        parameter.data = torch.randn_like(parameter)
    written.load_state_dict(unstack_experts(other, other.state_dict()))
    assert unstack_experts(other, {}) == {}  # of the other ranks
    torch.testing.assert_close(written(torch.ones(3, DIM)), other(torch.ones(3, DIM)))


class Normalizing(nn.Module):
    """Divides rows by their norm, before and after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x / x.norm(dim=-1, keepdim=True) @ self.weight
        return hidden / hidden.norm(dim=-1, keepdim=True)


class NormalizingList(InAList):
    def make(self) -> nn.Module:
        return nn.ModuleList([Normalizing() for _ in range(EXPERTS)])


def gradients_of_normalizing(sharded: bool, tokens: int) -> list[Tensor]:
    """Gradients of the input, the router and the experts (E, D, D), of the first `tokens` tokens."""
    with in_float64():
        torch.manual_seed(0)
        layer: Any = NormalizingList()
        x = batches(0)
        if sharded:
            rank, world = collectives.rank(), collectives.world_size()
            layer.rewrite()
            layer.rewritten = True
            groups = make_expert_groups(world)
            stacks = shard_experts(nn.ModuleDict({"layer": layer}), groups, spare_slots=1)
            x = x[:tokens] if rank == 0 else x[tokens:]
        x.requires_grad_()
        layer(x).square().sum().backward()
        if not sharded:
            return [x.grad, layer.router.weight.grad, torch.stack([expert.weight.grad for expert in layer.experts])]
        (stack,) = stacks.values()
        held = [slot for slot, expert in enumerate(stack.placement.slots[rank]) if expert >= 0]
        assert layer.experts.weight.grad.isfinite().all()
        return [x.grad, layer.router.weight.grad, world * layer.experts.weight.grad[held]]


@pytest.mark.parametrize(("world", "tokens"), [(1, 8), (2, 5), (2, 8)])
def test_stacked_experts_that_normalize_rows_have_the_gradients_of_the_list(world: int, tokens: int):
    """Slots are filled up, some get no row, some hold no expert, and a rank may have no tokens."""
    expected = gradients_of_normalizing(False, 8)
    ranks = run_distributed(gradients_of_normalizing, world, True, tokens)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), expected[0])
    torch.testing.assert_close(sum(rank[1] for rank in ranks), expected[1])
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), expected[2])


def test_stack_experts_of_unequal_modules_raises():
    one = nn.Linear(3, 3)
    different = [nn.Sequential(nn.Linear(3, 3), act) for act in (nn.ReLU(), nn.GELU())]
    for unequal in (different, [nn.BatchNorm1d(3), nn.BatchNorm1d(3)], [one, one]):
        with pytest.raises(UserError, match="Use modules of one kind without buffers"):
            stack_experts(unequal)
