"""Flat and hierarchical all-to-all on emulated nodes: results of one process, and minimum numbers of rows."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.precision import relative_difference
from benchmarks.support.processes import run_distributed
from toolkit.errors import UserError
from toolkit.experts.layer.dispatcher import LocalDispatcher, make_dispatcher
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.nodes import rows_of_nodes
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, contiguous

CASES = ("even", "ragged", "no tokens on rank 0", "all to the last rank", "top-1 to the last rank", "no tokens")
DIM, EXPERTS, TOP_K, WORLD = 5, 8, 2, 8
LAYOUTS = [(8, 4), (8, 2), (4, 2)]
"""(ep_size, processes per node): two nodes of four, four nodes of two, two EP groups of two nodes of two."""
STEPS = [("blocks", case, torch.float64, False) for case in CASES]
STEPS += [
    ("blocks", "even", torch.float32, False),
    ("uneven", "ragged", torch.float64, True),
    ("replicas", "ragged", torch.float64, False),
    ("replicas", "no tokens on rank 0", torch.float64, True),
]
"""(placement, case of `draw`, dtype, whether pairs are dropped)."""


def draw(case: str, rank: int, world: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, expert ids, weights and output gradient of one rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = {"ragged": 3 + 5 * rank, "no tokens on rank 0": 6 if rank else 0, "no tokens": 0}.get(case, 6)
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


def train(dispatcher: Any, inputs: Sequence[Tensor], experts: Tensor, kept_TK: Tensor | None) -> dict[str, Tensor]:
    """Return output and gradients of sum_k w_k * x @ M_k, computed slot by slot."""
    x_TD, ids_TK, weights_TK, grad_TD = (tensor.clone() for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (x_TD, weights_TK, experts)]
    rows, dispatched = dispatcher.dispatch(x_TD, ids_TK, weights_TK, kept_TK)
    parts = rows.split(dispatched.rows_per_slot.tolist())
    rows = torch.cat([part @ matrix for part, matrix in zip(parts, experts.unbind(), strict=True)])
    y_TD = dispatcher.combine(rows, dispatched)
    y_TD.backward(grad_TD)
    grads = zip(("x", "weights", "experts"), (leaf.grad for leaf in leaves), strict=True)
    return {"y": y_TD.detach(), **dict(grads), "load": dispatched.plan.load_E}


def emulated_groups(ep_size: int, per_node: int) -> ExpertGroups:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_node)):
        return make_expert_groups(ep_size, exchange="hierarchical")


def placements(ranks: int) -> dict[str, ExpertPlacement]:
    """Return contiguous, uneven with empty slots, and with replicas of experts 0 and 7 on one and on several nodes."""
    last = [(EMPTY_ROW,) for _ in range(ranks - 4)]
    return {
        "blocks": contiguous(EXPERTS, ranks),
        "uneven": ExpertPlacement(((3, EMPTY_ROW, 0), (5, 1, 7), (2,), (EMPTY_ROW, 6, 4), *last)),
        "replicas": ExpertPlacement(((0, 7, 2), (0, 1), (7, 3, 0), (4, 5, 6, EMPTY_ROW), *last)),
    }


def kept(rank: int, tokens: int) -> Tensor:
    """Return a mask that drops two of five pairs."""
    return torch.rand(tokens, 2, generator=torch.Generator().manual_seed(50 + rank)) < 0.6


@contextmanager
def rows_to_others() -> Iterator[dict[Any, int]]:
    """Count the rows that this rank sends to others, by process group."""
    rows: dict[Any, int] = defaultdict(int)
    original = dist.all_to_all_single

    def counted(result: Tensor, given: Tensor, received: Any = None, sent: Any = None, **options: Any) -> Any:
        if sent is not None:  # numbers of rows are exchanged without sizes
            rows[options["group"]] += sum(sent) - sent[dist.get_rank(options["group"])]
        return original(result, given, received, sent, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        yield rows


def both_exchanges() -> dict[Any, Any]:
    """Return, for each case, the results of both exchanges, the rows that they send, and the destination ranks."""
    rank, found = dist.get_rank(), {}
    for ep_size, per_node in LAYOUTS:
        groups = emulated_groups(ep_size, per_node)
        for name, case, dtype, drops in STEPS:
            placement = placements(ep_size)[name]
            mine = [max(expert, 0) for expert in placement.slots[groups.ep_rank]]
            flat = make_dispatcher(placement, replace(groups, nodes=None))
            inputs = draw(case, rank, WORLD, dtype)
            kept_TK = kept(rank, len(inputs[0])) if drops else None
            results: list[Any] = []
            rows: dict[Any, int] = {}
            for dispatcher in (flat, make_dispatcher(placement, groups)):
                of_flat = rows
                with rows_to_others() as rows:
                    results.append(train(dispatcher, inputs, expert_weights(dtype)[mine], kept_TK))
            peers_TK = flat.slots_of(inputs[1]) // placement.stride  # type: ignore[attr-defined]
            found[ep_size, per_node, name, case, dtype, drops] = (
                *results,
                (of_flat[groups.ep_group], rows[groups.nodes.between], rows[groups.nodes.inside]),
                (peers_TK if kept_TK is None else peers_TK.where(kept_TK, -1)).tolist(),
            )
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_distributed(both_exchanges, WORLD)


def test_both_exchanges_equal_one_process(ranks: list[dict[Any, Any]]):
    for key in ranks[0]:
        ep_size, _, placement, case, dtype, drops = key
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        results = [rank[key] for rank in ranks]
        for flat, hierarchical, *_ in results:
            assert torch.equal(flat["load"], hierarchical["load"])
            for name in ("y", "x", "weights", "experts"):
                difference = (hierarchical[name] - flat[name]).norm()
                assert difference <= tolerance * flat[name].norm().clamp(min=1e-3), f"{name} of {key}"
        for first in range(0, WORLD, ep_size):
            of_group = range(first, first + ep_size)
            inputs = [draw(case, rank, WORLD, dtype) for rank in of_group]
            masks = [kept(rank, len(x_TD)) for rank, (x_TD, *_) in zip(of_group, inputs, strict=True)]
            inputs = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
            kept_TK = torch.cat(masks) if drops else None
            expected = train(LocalDispatcher(contiguous(EXPERTS, 1)), inputs, expert_weights(dtype), kept_TK)
            found = {name: torch.cat([results[rank][1][name] for rank in of_group]) for name in ("y", "x", "weights")}
            found["experts"] = torch.zeros_like(expected["experts"])
            for rank, row in zip(of_group, placements(ep_size)[placement].slots, strict=True):
                for slot, expert in enumerate(row):
                    if expert != EMPTY_ROW:  # gradients are means over the ranks' batches
                        found["experts"][expert] += ep_size * results[rank][1]["experts"][slot]
            for name, value in found.items():
                assert relative_difference(value, expected[name]) <= tolerance, f"{name} of {key}"
            assert torch.equal(sum(results[rank][1]["load"] for rank in of_group), expected["load"])


def test_each_row_is_sent_once_per_rank_and_once_per_other_node(ranks: list[dict[Any, Any]]):
    for key in ranks[0]:
        ep_size, per_node, *_ = key
        between = inside = flat = 0
        for rank, result in enumerate(ranks):
            place = rank % ep_size
            for peers in result[key][3]:
                visited = {peer for peer in peers if peer >= 0}
                flat += len(visited - {place})
                between += len({peer // per_node for peer in visited} - {place // per_node})
                inside += sum(peer % per_node != place % per_node for peer in visited)
        # Dispatch and combine, forward and backward.
        sent = [rank[key][2] for rank in ranks]
        assert [sum(rows) for rows in zip(*sent, strict=True)] == [4 * flat, 4 * between, 4 * inside], key
        if key[2:4] == ("blocks", "even"):
            assert 0 < between < flat


@pytest.mark.parametrize(
    ("ranks", "per_node", "rows"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([2, 3, 4, 5], 2, [[2, 3], [4, 5]]),
        ([5, 0, 4, 1], 4, [[0, 1], [4, 5]]),
        ([0, 3, 6], 1, [[0], [3], [6]]),
    ],
)
def test_rows_of_nodes_groups_consecutive_ranks(ranks: list[int], per_node: int, rows: list[list[int]]):
    assert rows_of_nodes(ranks, [per_node] * 8) == rows


@pytest.mark.parametrize(("per_node", "parts"), [(4, "4 on nodes of 4"), (3, "3, 1 on nodes of 3")])
def test_rows_of_nodes_with_one_node_or_unequal_parts_raises(per_node: int, parts: str):
    with pytest.raises(UserError, match=f"the EP group of processes 0, 1, 2, 3 has {parts}"):
        rows_of_nodes([0, 1, 2, 3], [per_node] * 4)


def hierarchical_errors() -> list[str]:
    found = []
    for ep_size, per_node in ((2, 2), (2, 1 + dist.get_rank())):
        with pytest.raises(UserError) as error:
            emulated_groups(ep_size, per_node)
        found.append(str(error.value))
    return found


def test_hierarchical_exchange_with_invalid_nodes_raises_on_all_ranks():
    first, second = run_distributed(hierarchical_errors, 2)
    assert first == second
    for message, expected in zip(first, ("has 2 on nodes of 2", "nodes of 1, 2"), strict=True):
        assert message.startswith("exchange='hierarchical': ")
        assert expected in message
