"""Experts of other layouts, adapted for `ExpertParallel`, compared with the unmodified layer on one process."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import run_distributed
from tests.support.placements import by_slot
from toolkit.errors import UserError
from toolkit.experts.parallel import collectives
from toolkit.experts.parallel.groups import make_expert_groups
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


class Normalizing(nn.Module):
    """Divides rows by their norm, before and after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x / x.norm(dim=-1, keepdim=True) @ self.weight
        return hidden / hidden.norm(dim=-1, keepdim=True)


class SortedRows(nn.Module):
    """Called with rows sorted by expert and the number of rows per expert; `flat` tables are 2-dimensional."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        w1, w2 = torch.randn(EXPERTS, WIDTH, DIM), torch.randn(EXPERTS, DIM, WIDTH)
        self.w1, self.w2 = (nn.Parameter(w.flatten(0, 1) if flat else w) for w in (w1, w2))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        w1, w2 = self.w1.view(self.num_experts, WIDTH, DIM), self.w2.view(self.num_experts, DIM, WIDTH)
        parts = x.split(counts.tolist())
        return torch.cat([F.silu(part @ w1[e].T) @ w2[e].T for e, part in enumerate(parts)])


class Einsum(nn.Module):
    """Called with rows of all experts, shape (E, rows, DIM)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("ecd,edf->ecf", x, self.gate_up).chunk(2, -1)
        return torch.einsum("ecf,efd->ecd", F.silu(gate) * up, self.down)


class WeightsBeforeIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, DIM))

    def forward(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return (torch.einsum("td,tkdf->tkf", x, self.up[chosen]).tanh() * scores[..., None]).sum(1)


def call_list(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, choice = (ids == number).nonzero(as_tuple=True)
        out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
    return out


def call_sorted(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    order = ids.flatten().argsort(stable=True)
    rows = experts(x[order // K], ids.flatten().bincount(minlength=EXPERTS))
    return torch.zeros_like(x).index_add(0, order // K, rows * weights.flatten()[order, None])


def call_batched(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gates = torch.zeros(len(x), EXPERTS).scatter(1, ids, weights)
    return torch.einsum("te,etd->td", gates, experts(x.expand(EXPERTS, *x.shape)))


def call_by_keywords(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return experts(x, chosen=ids, scores=weights)


class Layout(NamedTuple):
    make: Callable[[], nn.Module]
    call: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    adapt: Callable[[Any], Any]
    call_adapted: Callable[[Any, Tensor, Tensor, Tensor], Tensor] = lambda experts, *args: experts(*args)


def list_of(expert: type[nn.Module]) -> Layout:
    return Layout(lambda: nn.ModuleList([expert() for _ in range(EXPERTS)]), call_list, stack_experts)


LAYOUTS = {
    "list": list_of(FeedForward),
    "sorted rows": Layout(SortedRows, call_sorted, sorted_experts),
    "flat tables": Layout(lambda: SortedRows(flat=True), call_sorted, sorted_experts),
    "batched einsum": Layout(Einsum, call_batched, batched_experts),
    "weights before ids": Layout(WeightsBeforeIds, call_by_keywords, lambda experts: experts, call_by_keywords),
}


class Layer(nn.Module):
    """A router, and experts of a layout that `adapt` changes."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts: Any = layout.make()
        self.layout, self.call = layout, layout.call

    def adapt(self) -> None:
        self.experts, self.call = self.layout.adapt(self.experts), self.layout.call_adapted

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return x + self.call(self.experts, x, ids, weights)


def build(layout: Layout, *, adapted: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), Layer(layout))
    if adapted:
        model[1].adapt()
    return model


def batch(step: int) -> Tensor:
    return torch.randn(8, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(sharded: bool) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Return losses and weights of each layout, unmodified on one process or adapted and sharded."""
    found = {}
    with in_float64():
        for name, layout in LAYOUTS.items():
            accelerator = Accelerator(cpu=True)
            model = wrapped = build(layout, adapted=sharded)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            if sharded:
                parallel = ExpertParallel(accelerator, placement=lambda _, __, ranks: by_slot([1, 3, 2, 0], ranks))
                wrapped, optimizer = parallel.prepare(model, optimizer)
            losses = []
            for step in range(STEPS):
                loss = wrapped(batch(step)[accelerator.process_index :: accelerator.num_processes]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found[name] = losses, whole_state_dict(model)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = run_distributed(train, 1, False)[0]
    weights = found["list"][1]
    for name in ("up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight"):
        rows = [weights.pop(f"1.experts.{expert}.{name}") for expert in range(EXPERTS)]
        weights[f"1.experts.{name.replace('.', '_')}"] = torch.stack(rows)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_adapted_layers_train_like_the_unmodified_layers(world, expected):
    ranks = run_distributed(train, world, True)
    for name, (losses, weights) in expected.items():
        found = torch.tensor([rank[name][0] for rank in ranks], dtype=torch.float64).mean(0)
        assert found.tolist() == pytest.approx(losses, rel=IN_FLOAT64)
        assert losses[-1] != pytest.approx(losses[0])
        torch.testing.assert_close(dict(ranks[0][name][1]), weights, rtol=IN_FLOAT64, atol=1e-12)


def test_stack_experts_and_unstack_experts_convert_state_dicts():
    model, adapted, x = build(LAYOUTS["list"]), build(LAYOUTS["list"], adapted=True), torch.ones(3, DIM)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    adapted.load_state_dict(model.state_dict())
    torch.testing.assert_close(adapted(x), model(x))
    assert copy.deepcopy(adapted)(x).equal(adapted(x))
    for parameter in adapted.parameters():
        parameter.data = torch.randn_like(parameter)
    model.load_state_dict(unstack_experts(adapted, adapted.state_dict()))
    torch.testing.assert_close(model(x), adapted(x))
    assert unstack_experts(adapted, {}) == {}, "the state dict of other ranks"


def gradients_of_normalizing(sharded: bool, tokens: int) -> list[Tensor]:
    """Return gradients of input, router and experts (E, D, D); rank 0 has the first `tokens` tokens."""
    with in_float64():
        layer, x = build(list_of(Normalizing), adapted=sharded)[1], batch(0)
        if sharded:
            rank, world = collectives.rank(), collectives.world_size()
            (stack,) = shard_experts(nn.ModuleDict({"layer": layer}), make_expert_groups(world), spare_slots=1).values()
            x = x[:tokens] if rank == 0 else x[tokens:]
        x.requires_grad_()
        layer(x).square().sum().backward()
        if not sharded:
            return [x.grad, layer.router.weight.grad, torch.stack([expert.weight.grad for expert in layer.experts])]
        held = [slot for slot, expert in enumerate(stack.placement.slots[rank]) if expert >= 0]
        assert layer.experts.weight.grad.isfinite().all()
        return [x.grad, layer.router.weight.grad, world * layer.experts.weight.grad[held]]


@pytest.mark.parametrize(("world", "tokens"), [(1, 8), (2, 5), (2, 8)])
def test_stacked_experts_that_normalize_rows_have_the_gradients_of_the_list(world: int, tokens: int):
    """Slots are padded, some get no row, some hold no expert, and a rank may have no tokens."""
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
