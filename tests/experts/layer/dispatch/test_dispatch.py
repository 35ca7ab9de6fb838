"""Dispatch and combine, first on lists drawn by hand, then between ranks against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.helpers import run_distributed
from tests.support.placements import by_slot
from toolkit.experts.layer.dispatcher import AllToAllDispatcher, LocalDispatcher, TokenDispatcher
from toolkit.experts.layer.rows import sort_by_slot
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement, contiguous

DIM, EXPERTS, TOP_K = 5, 8, 2


def test_assignments_are_sorted_by_slot_and_stay_in_token_order_within_one() -> None:
    """
    token          t0      t1      t2      t3
    slots          2 0     0 1     2 1     0 2
    assignment     0 1     2 3     4 5     6 7

    slot order     slot 0: t0 t1 t3    slot 1: t1 t2    slot 2: t0 t2 t3
    assignment             1  2  6             3  5             0  4  7
    place                  0  1  2             3  4             5  6  7
    """
    order = sort_by_slot(torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]]), 3, 8)
    assert order.rows_per_slot.tolist() == [3, 2, 3]
    assert order.pair.tolist() == [1, 2, 6, 3, 5, 0, 4, 7]
    assert order.source.tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert order.place.tolist() == [5, 0, 1, 3, 6, 4, 2, 7]


@pytest.mark.parametrize(
    ("slots_TK", "rows_per_slot", "pair", "place", "first"),
    [
        pytest.param([[-1, 2], [5, -1]], [0, 0], [], [], [0, 0], id="none is here"),
        pytest.param([[1], [1], [1]], [0, 3], [0, 1, 2], [0, 1, 2], [0, 1, 2], id="all to one slot"),
        pytest.param([[1, 0], [-1, 2], [2, 1]], [1, 2], [1, 0, 5], [1, 0, 2], [0, 2, 2], id="a token without any"),
    ],
)
def test_edges_of_the_order(
    slots_TK: list[list[int]], rows_per_slot: list[int], pair: list[int], place: list[int], first: list[int]
) -> None:
    order = sort_by_slot(torch.tensor(slots_TK), 2, len(pair))
    assert order.rows_per_slot.tolist() == rows_per_slot
    assert order.pair.tolist() == pair
    assert order.source.tolist() == [assignment // len(slots_TK[0]) for assignment in pair]
    assert order.place.tolist() == place
    assert order.first.tolist() == first


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("top_k", [1, 3])
def test_gradients_of_tokens_rows_and_weights_are_exact(tokens: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(tokens + top_k)
    x_TD = torch.randn(tokens, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weights_TK = torch.rand(tokens, top_k, dtype=torch.float64, generator=generator, requires_grad=True)
    ids_TK = torch.rand(tokens, 6, generator=generator).topk(top_k).indices
    factor_N1 = torch.rand(tokens * top_k, 1, dtype=torch.float64, generator=generator, requires_grad=True)
    dispatcher = LocalDispatcher(contiguous(6, 1))

    def trip(x_TD: Tensor, weights_TK: Tensor, factor_N1: Tensor) -> Tensor:
        rows, dispatched = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
        return dispatcher.combine(rows * factor_N1, dispatched)

    if tokens:
        assert torch.autograd.gradcheck(trip, (x_TD, weights_TK, factor_N1))
    else:
        trip(x_TD, weights_TK, factor_N1).sum().backward()
        assert x_TD.grad is not None
        assert x_TD.grad.shape == (0, 4)


def test_an_expanded_output_gradient_is_taken() -> None:
    x_TD = torch.randn(3, 4, requires_grad=True)
    dispatcher = LocalDispatcher(contiguous(2, 1))
    ids_TK, weights_TK = torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.full((3, 2), 0.5)
    dispatcher.combine(*dispatcher.dispatch(x_TD, ids_TK, weights_TK)).sum().backward()
    torch.testing.assert_close(x_TD.grad, torch.ones(3, 4))
    x_TD.grad = None
    dispatcher.dispatch(x_TD, ids_TK, weights_TK)[0].sum().backward()
    torch.testing.assert_close(x_TD.grad, torch.full((3, 4), 2.0))


def test_rows_in_bfloat16_are_weighted_by_float32_weights_that_get_a_float32_gradient() -> None:
    rows = torch.randn(4, 8).bfloat16().requires_grad_()
    weights_TK = torch.tensor([[0.3, 0.7], [0.6, 0.4]], requires_grad=True)
    dispatcher = LocalDispatcher(contiguous(2, 1))
    _, dispatched = dispatcher.dispatch(torch.randn(2, 8), torch.tensor([[0, 1], [1, 0]]), weights_TK)
    y_TD = dispatcher.combine(rows, dispatched)
    y_TD.float().sum().backward()
    assert y_TD.dtype == torch.bfloat16
    assert rows.grad is not None
    assert rows.grad.dtype == torch.bfloat16
    assert weights_TK.grad is not None
    # Rows: t0 t1 of expert 0, then t0 t1 of expert 1.
    sums = rows.detach().double().sum(1)
    torch.testing.assert_close(weights_TK.grad, torch.stack([sums[[0, 2]], sums[[3, 1]]]).float(), atol=1e-5, rtol=1e-5)


# --- between ranks -----------------------------------------------------------------------------------------------


def draw(case: str, rank: int, world: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, expert ids, weights and output gradient of one rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = {"ragged": 3 + 5 * rank, "no tokens on rank 0": 6 if rank else 0, "no tokens anywhere": 0}.get(case, 6)
    top_k = 1 if case == "top-1 to the last rank" else TOP_K
    ids_TK = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k).indices
    if case.endswith("to the last rank"):
        per_rank = EXPERTS // world
        ids_TK = EXPERTS - per_rank + ids_TK % per_rank
    draws = (torch.randn(tokens, n, dtype=torch.float64, generator=generator) for n in (DIM, top_k, DIM))
    x_TD, weights_TK, grad_TD = (draw.to(dtype) for draw in draws)
    return x_TD, ids_TK, weights_TK, grad_TD


def expert_weights(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(EXPERTS, DIM, DIM, dtype=torch.float64, generator=generator).to(dtype)


def train(
    dispatcher: TokenDispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, grad_TD: Tensor, experts: Tensor
) -> dict[str, Tensor]:
    """Output and gradients of sum_k w_k * x @ M_k, computed slot by slot."""
    leaves = [tensor.requires_grad_() for tensor in (x_TD, weights_TK, experts)]
    rows, dispatched = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    parts = rows.split(dispatched.rows_per_slot.tolist())
    rows = torch.cat([part @ matrix for part, matrix in zip(parts, experts.unbind(), strict=True)])
    y_TD = dispatcher.combine(rows, dispatched)
    y_TD.backward(grad_TD)
    x_grad, weights_grad, experts_grad = (leaf.grad for leaf in leaves)
    assert x_grad is not None
    assert weights_grad is not None
    assert experts_grad is not None
    found = {"y": y_TD.detach(), "x": x_grad, "weights": weights_grad, "experts": experts_grad}
    return found | {"load": dispatched.plan.load_E}


CASES = (
    "even",
    "ragged",
    "no tokens on rank 0",
    "all to the last rank",
    "top-1 to the last rank",
    "no tokens anywhere",
)
SLOT_OF_EXPERT = [3, 0, 6, 1, 7, 2, 4, 5]


def every_case_on_one_rank() -> dict[tuple[str, torch.dtype], dict[str, Tensor]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAllDispatcher(by_slot(SLOT_OF_EXPERT, world), make_expert_groups(world))
    slots = EXPERTS // world
    mine = [SLOT_OF_EXPERT.index(slot) for slot in range(rank * slots, (rank + 1) * slots)]
    return {
        (case, dtype): train(dispatcher, *draw(case, rank, world, dtype), expert_weights(dtype)[mine])
        for case in CASES
        for dtype in (torch.float64, torch.float32)
    }


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_compute_what_one_process_computes(world: int) -> None:
    results = run_distributed(every_case_on_one_rank, world)
    for case, dtype in results[0]:
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        ranks = [result[case, dtype] for result in results]
        inputs = zip(*(draw(case, rank, world, dtype) for rank in range(world)), strict=True)
        expected = train(LocalDispatcher(contiguous(EXPERTS, 1)), *map(torch.cat, inputs), expert_weights(dtype))
        by_slot = world * torch.cat([rank["experts"] for rank in ranks])  # means over the ranks' batches
        actual = {name: torch.cat([rank[name] for rank in ranks]) for name in ("y", "x", "weights")}
        actual["experts"] = by_slot[SLOT_OF_EXPERT]
        for name, tensor in actual.items():
            error = (tensor - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)
            assert error <= tolerance, f"{name} of case {case!r} in {dtype} is off by {error:.1e}"
        assert torch.equal(sum(rank["load"] for rank in ranks), expected["load"])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_negative_ids_do_not_count_from_the_end(order: tuple[int, ...]):
    dispatcher = LocalDispatcher(ExpertPlacement((order,)))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        dispatcher.dispatch(torch.randn(2, 4), torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2))
