"""The flat exchange and the hierarchical one on emulated nodes: what one process computes, by as few rows as can be."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.experts.layer.dispatch.test_dispatch import CASES, EXPERTS, draw, expert_weights, train
from tests.support.equality import relative_difference
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.layer.dispatcher import Dispatched, LocalDispatcher, TokenDispatcher, make_dispatcher
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.nodes import rows_of_nodes
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, contiguous

WORLD = 8
LAYOUTS = [(8, 4), (8, 2), (4, 2)]
"""(ep_size, processes of a node): two nodes of four, four nodes of two, two EP groups of two nodes of two."""
STEPS = [("blocks", case, torch.float64, False) for case in CASES]
STEPS += [
    ("blocks", "even", torch.float32, False),
    ("uneven", "ragged", torch.float64, True),
    ("replicas", "ragged", torch.float64, False),
    ("replicas", "no tokens on rank 0", torch.float64, True),
]
"""(placement, what tokens choose, dtype, whether assignments are dropped)."""


def emulated_groups(ep_size: int, per_node: int) -> ExpertGroups:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_node)):
        return make_expert_groups(ep_size, exchange="hierarchical")


def placements(ranks: int) -> dict[str, ExpertPlacement]:
    """Equal blocks; uneven and shuffled with empty slots; replicas of experts 0 and 7 on one node and on others."""
    last = [(EMPTY_ROW,) for _ in range(ranks - 4)]
    return {
        "blocks": contiguous(EXPERTS, ranks),
        "uneven": ExpertPlacement(((3, EMPTY_ROW, 0), (5, 1, 7), (2,), (EMPTY_ROW, 6, 4), *last)),
        "replicas": ExpertPlacement(((0, 7, 2), (0, 1), (7, 3, 0), (4, 5, 6, EMPTY_ROW), *last)),
    }


@dataclass
class Dropping:
    """A dispatcher that does not send the assignments outside of `kept_TK`."""

    dispatcher: TokenDispatcher
    kept_TK: Tensor

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Dispatched]:
        return self.dispatcher.dispatch(x_TD, ids_TK, weights_TK, self.kept_TK)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        return self.dispatcher.combine(rows, dispatched)


def kept(rank: int, tokens: int) -> Tensor:
    """A mask as of a capacity, which drops two in five."""
    return torch.rand(tokens, 2, generator=torch.Generator().manual_seed(50 + rank)) < 0.6


@contextmanager
def rows_to_others() -> Iterator[dict[Any, int]]:
    """Rows of tokens that this rank sends to others meanwhile, by process group."""
    rows: dict[Any, int] = defaultdict(int)
    original = dist.all_to_all_single

    def counted(result: Tensor, given: Tensor, received: Any = None, sent: Any = None, **options: Any) -> Any:
        if sent is not None:  # numbers of rows are exchanged without sizes
            rows[options["group"]] += sum(sent) - sent[dist.get_rank(options["group"])]
        return original(result, given, received, sent, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        yield rows


def both_exchanges() -> dict[Any, Any]:
    """Of each case: what both exchanges compute on this rank, the rows that they send, and the slots that they want."""
    rank, found = dist.get_rank(), {}
    for ep_size, per_node in LAYOUTS:
        groups = emulated_groups(ep_size, per_node)
        assert groups.nodes is not None
        for name, case, dtype, drops in STEPS:
            placement = placements(ep_size)[name]
            mine = [max(expert, 0) for expert in placement.slots[groups.ep_rank]]
            flat = make_dispatcher(placement, replace(groups, nodes=None))
            inputs = draw(case, rank, WORLD, dtype)
            kept_TK = kept(rank, len(inputs[0])) if drops else None
            results: list[Any] = []
            rows: dict[Any, int] = {}
            for dispatcher in (flat, make_dispatcher(placement, groups)):
                chosen: Any = dispatcher if kept_TK is None else Dropping(dispatcher, kept_TK)
                of_flat = rows
                with rows_to_others() as rows:
                    fresh = [tensor.clone() for tensor in inputs]
                    results.append(train(chosen, *fresh, expert_weights(dtype)[mine]))
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


def test_both_exchanges_compute_what_one_process_computes(ranks: list[dict[Any, Any]]):
    for key in ranks[0]:
        ep_size, _, _, case, dtype, drops = key
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
            alone: Any = LocalDispatcher(contiguous(EXPERTS, 1))
            if drops:
                masks = [kept(rank, len(x_TD)) for rank, (x_TD, *_) in zip(of_group, inputs, strict=True)]
                alone = Dropping(alone, torch.cat(masks))
            expected = train(alone, *map(torch.cat, zip(*inputs, strict=True)), expert_weights(dtype))
            for name in ("y", "x", "weights"):
                found = torch.cat([results[rank][1][name] for rank in of_group])
                assert relative_difference(found, expected[name]) <= tolerance, f"{name} of {key}"
            assert torch.equal(sum(results[rank][1]["load"] for rank in of_group), expected["load"])


def test_a_row_goes_once_to_each_rank_and_between_nodes_once_to_each_node(ranks: list[dict[Any, Any]]):
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
def test_nodes_are_consecutive_ranks_of_the_world(ranks: list[int], per_node: int, rows: list[list[int]]):
    assert rows_of_nodes(ranks, [per_node] * 8) == rows


@pytest.mark.parametrize(("per_node", "parts"), [(4, "4 on nodes of 4"), (3, "3, 1 on nodes of 3")])
def test_groups_on_one_node_or_with_unequal_parts_raise(per_node: int, parts: str):
    with pytest.raises(UserError, match=f"the EP group of processes 0, 1, 2, 3 has {parts}"):
        rows_of_nodes([0, 1, 2, 3], [per_node] * 4)


def refusals() -> list[str]:
    said = []
    for ep_size, per_node in ((2, 2), (2, 1 + dist.get_rank())):
        try:
            emulated_groups(ep_size, per_node)
        except UserError as error:
            said.append(str(error))
    return said


def test_ranks_refuse_the_same_groups_together():
    first, second = run_distributed(refusals, 2)
    assert first == second
    for sentence, expected in zip(first, ("has 2 on nodes of 2", "nodes of 1, 2"), strict=True):
        assert sentence.startswith("exchange='hierarchical': ")
        assert expected in sentence
