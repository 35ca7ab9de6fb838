"""Dispatch and combine on one process, compared with values by hand."""

import pytest
import torch
from torch import Tensor

from toolkit.experts.layer.dispatcher import AllToAllDispatcher, LocalDispatcher
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.placement.traffic import rows_per_slot


def test_tokens_take_turns_at_replicas_and_ranks_start_at_different_ones() -> None:
    placement = ExpertPlacement(((0, 1), (2, 3), (0, 4)))
    dispatcher = AllToAllDispatcher(placement, ExpertGroups(ep_size=3, ep_rank=1))
    slots = dispatcher.slots_of(torch.zeros(3, 1, dtype=torch.int64)).flatten()
    assert slots.tolist() == [4, 0, 4]
    assert slots.bincount(minlength=6).tolist() == rows_per_slot([[3, 0, 0, 0, 0]], placement, sources=[1])[0].tolist()


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("top_k", [1, 3])
def test_gradients_of_tokens_rows_and_weights_equal_finite_differences(tokens: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(tokens + top_k)
    x_TD = torch.randn(tokens, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weights_TK = torch.rand(tokens, top_k, dtype=torch.float64, generator=generator, requires_grad=True)
    ids_TK = torch.rand(tokens, 6, generator=generator).topk(top_k).indices
    factor_N1 = torch.rand(tokens * top_k, 1, dtype=torch.float64, generator=generator, requires_grad=True)
    dispatcher = LocalDispatcher(contiguous(6, 1))

    def round_trip(x_TD: Tensor, weights_TK: Tensor, factor_N1: Tensor) -> Tensor:
        rows, dispatched = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
        return dispatcher.combine(rows * factor_N1, dispatched)

    if tokens:
        assert torch.autograd.gradcheck(round_trip, (x_TD, weights_TK, factor_N1))
    else:
        round_trip(x_TD, weights_TK, factor_N1).sum().backward()
        assert x_TD.grad.shape == (0, 4)


def test_dispatch_and_combine_accept_expanded_gradients() -> None:
    x_TD = torch.randn(3, 4, requires_grad=True)
    dispatcher = LocalDispatcher(contiguous(2, 1))
    ids_TK, weights_TK = torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.full((3, 2), 0.5)
    dispatcher.combine(*dispatcher.dispatch(x_TD, ids_TK, weights_TK)).sum().backward()
    torch.testing.assert_close(x_TD.grad, torch.ones(3, 4))
    x_TD.grad = None
    dispatcher.dispatch(x_TD, ids_TK, weights_TK)[0].sum().backward()
    torch.testing.assert_close(x_TD.grad, torch.full((3, 4), 2.0))


def test_combine_of_bfloat16_rows_keeps_float32_gradients_of_weights() -> None:
    rows = torch.randn(4, 8).bfloat16().requires_grad_()
    weights_TK = torch.tensor([[0.3, 0.7], [0.6, 0.4]], requires_grad=True)
    dispatcher = LocalDispatcher(contiguous(2, 1))
    _, dispatched = dispatcher.dispatch(torch.randn(2, 8), torch.tensor([[0, 1], [1, 0]]), weights_TK)
    y_TD = dispatcher.combine(rows, dispatched)
    y_TD.float().sum().backward()
    assert y_TD.dtype == rows.grad.dtype == torch.bfloat16
    # Rows: t0 t1 of expert 0, then t0 t1 of expert 1.
    sums = rows.detach().double().sum(1)
    torch.testing.assert_close(weights_TK.grad, torch.stack([sums[[0, 2]], sums[[3, 1]]]).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_negative_expert_ids_raise(order: tuple[int, ...]):
    dispatcher = LocalDispatcher(ExpertPlacement((order,)))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        dispatcher.dispatch(torch.randn(2, 4), torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2))
