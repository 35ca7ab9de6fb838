"""Which ranks share the experts: neighbours, ranks that are some way apart, and any groups that a script names."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.parallel import groups
from toolkit.experts.parallel.groups import ExpertGroups, Partition, make_expert_groups, partition_of, strided_partition


def receive_what_nobody_sends(done: Path) -> None:
    groups.timeout_of = lambda: timedelta(seconds=0.2)
    value = torch.zeros(1)
    if dist.get_rank() == 0:
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, value, 1)])
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            groups.wait_for(work, value.device)
        done.touch()
    while not done.exists():
        time.sleep(0.02)


def test_a_row_that_a_rank_does_not_send_is_not_awaited_for_ever(tmp_path):
    run_distributed(receive_what_nobody_sends, 2, tmp_path / "done", timeout_s=60)


def described(made: ExpertGroups) -> tuple[Any, ...]:
    """The index of this rank in its EP group, the ranks of both its groups, and all EP groups."""
    here = [None if g is None else dist.get_process_group_ranks(g) for g in (made.ep_group, made.expert_dp_group)]
    return made.ep_rank, *here, made.ep_groups


def of_four_ranks() -> dict[str, tuple[Any, ...]]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ways: dict[str, dict[str, Any]] = {
        "neighbours": {"ep_size": 2},
        "all": {"ep_size": 4},
        "alone": {"ep_size": 1},
        "two apart": {"ep_size": 2, "ep_stride": 2},
        "named": {"ranks": [[3, 0], [2, 1]]},
        "inner": {"ranks": mesh["inner"]},
        "outer": {"ranks": mesh["outer"]},
        "three": {"ep_size": 3},
        "too far": {"ep_size": 4, "ep_stride": 2},
        "unequal": {"ranks": [[0], [1, 2, 3]]},
        "without one": {"ranks": [[0, 1], [2]]},
        "with others": {"ranks": [[0, 1], [2, 3], [4, 5]]},
        "one twice": {"ranks": [[0, 1], [1, 2]]},
        "disagreeing": {"ranks": [[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]]},
        "whole mesh": {"ranks": mesh},
        "both": {"ep_size": 2, "ranks": [[0, 1], [2, 3]]},
        "named and apart": {"ranks": [[0, 1], [2, 3]], "ep_stride": 2},
    }
    found = {}
    for name, way in ways.items():
        try:
            found[name] = described(make_expert_groups(**way))
        except UserError as error:
            found[name] = str(error)
    return found


def test_make_expert_groups_on_four_ranks_returns_the_groups_or_raises_on_all():
    ranks = run_distributed(of_four_ranks, 4)
    blocks, apart, crossed = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))
    for rank, found in enumerate(ranks):
        inner, outer = rank % 2, rank // 2
        neighbours = (inner, [2 * outer, 2 * outer + 1], [inner, inner + 2], blocks)
        across = (outer, [inner, inner + 2], [2 * outer, 2 * outer + 1], apart)
        assert found["neighbours"] == found["inner"] == neighbours
        assert found["two apart"] == found["outer"] == across
        assert found["all"] == (rank, [0, 1, 2, 3], None, ((0, 1, 2, 3),))
        assert found["alone"] == (0, None, [0, 1, 2, 3], ((0,), (1,), (2,), (3,)))
        pair = sorted((rank, 3 - rank))
        assert found["named"] == (pair.index(rank), pair, [0, 1] if rank < 2 else [2, 3], crossed)
        assert found["three"] == "ep_size=3: it does not divide the 4 process(es) of this launch: use one of 1, 2, 4."
        assert found["too far"] == (
            "ep_stride=2: it does not divide the 1 EP group(s) of 4 among 4 process(es): use one of 1."
        )
        assert found["without one"].startswith("ranks: makes groups [], [0, 1], [2] of 4 process(es). Give every")
        for wrong in ("unequal", "with others", "one twice", "disagreeing", "whole mesh"):
            assert found[wrong].startswith("ranks: makes groups ")
            assert found[wrong] == ranks[0][wrong]
        assert "give no ep_size and no ep_stride" in found["both"]
        assert found["named and apart"] == found["both"]


def test_one_process_has_no_groups_of_two():
    with pytest.raises(UserError, match=r"use one of 1\."):
        make_expert_groups(2)
    with pytest.raises(UserError, match="ep_stride=2: it does not divide"):
        make_expert_groups(1, ep_stride=2)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_strided_groups_have_every_rank_once_at_equal_distances(ep_size: int, stride: int, blocks: int):
    world = ep_size * stride * blocks
    partition = strided_partition(world, ep_size, stride)
    assert sorted(rank for group in partition for rank in group) == list(range(world))
    assert list(partition) == sorted(partition)
    assert all(tuple(range(group[0], group[-1] + 1, stride)) == group for group in partition)
    assert partition_of([next(group for group in partition if rank in group) for rank in range(world)]) == partition


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    size, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    order = draw(st.permutations(range(size * groups)))
    return tuple(sorted(tuple(sorted(order[first : first + size])) for first in range(0, len(order), size)))


@given(partitions(), st.data())
def test_every_partition_into_equal_groups_is_taken_and_no_other(partition: Partition, data: st.DataObject):
    world = sum(map(len, partition))
    group_of_rank = [list(next(group for group in partition if rank in group)) for rank in range(world)]
    assert partition_of(group_of_rank) == partition
    rank = data.draw(st.integers(0, world - 1))
    other = data.draw(st.lists(st.integers(0, world), max_size=5).map(sorted))
    if other != group_of_rank[rank]:
        group_of_rank[rank] = other
        with pytest.raises(UserError, match=r"ranks: makes groups"):
            partition_of(group_of_rank)
