"""Expert-parallel groups: consecutive ranks, strided ranks, and custom groups."""

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

from benchmarks.support.processes import run_distributed
from toolkit.errors import UserError
from toolkit.experts.parallel import groups
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups, partition_of, strided_partition


def receive_without_a_sender(done: Path) -> None:
    groups.timeout_of = lambda: timedelta(seconds=0.2)
    value = torch.zeros(1)
    if dist.get_rank() == 0:
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, value, 1)])
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            groups.wait_for(work, value.device)
        done.touch()
    while not done.exists():
        time.sleep(0.02)


def test_receive_without_a_sender_times_out(tmp_path):
    run_distributed(receive_without_a_sender, 2, tmp_path / "done", timeout_s=60)


def described(made: ExpertGroups) -> tuple[Any, ...]:
    """Return the rank in the EP group, the ranks of the EP and the expert data-parallel group, and all EP groups."""
    here = [None if g is None else dist.get_process_group_ranks(g) for g in (made.ep_group, made.expert_dp_group)]
    return made.ep_rank, *here, made.ep_groups


def groups_of_four_ranks() -> dict[str, tuple[Any, ...]]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    arguments: dict[str, dict[str, Any]] = {
        "consecutive": {"ep_size": 2},
        "all": {"ep_size": 4},
        "single": {"ep_size": 1},
        "strided": {"ep_size": 2, "ep_stride": 2},
        "custom": {"ranks": [[3, 0], [2, 1]]},
        "inner": {"ranks": mesh["inner"]},
        "outer": {"ranks": mesh["outer"]},
        "three": {"ep_size": 3},
        "large stride": {"ep_size": 4, "ep_stride": 2},
        "unequal sizes": {"ranks": [[0], [1, 2, 3]]},
        "missing rank": {"ranks": [[0, 1], [2]]},
        "invalid ranks": {"ranks": [[0, 1], [2, 3], [4, 5]]},
        "repeated rank": {"ranks": [[0, 1], [1, 2]]},
        "unequal arguments": {"ranks": [[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]]},
        "mesh": {"ranks": mesh},
        "size and ranks": {"ep_size": 2, "ranks": [[0, 1], [2, 3]]},
        "stride and ranks": {"ranks": [[0, 1], [2, 3]], "ep_stride": 2},
    }
    found = {}
    for name, keywords in arguments.items():
        try:
            found[name] = described(make_expert_groups(**keywords))
        except UserError as error:
            found[name] = str(error)
    return found


def test_make_expert_groups_returns_groups_or_raises_on_all_ranks():
    ranks = run_distributed(groups_of_four_ranks, 4)
    blocks, apart, crossed = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))
    for rank, found in enumerate(ranks):
        inner, outer = rank % 2, rank // 2
        consecutive = (inner, [2 * outer, 2 * outer + 1], [inner, inner + 2], blocks)
        strided = (outer, [inner, inner + 2], [2 * outer, 2 * outer + 1], apart)
        assert found["consecutive"] == found["inner"] == consecutive
        assert found["strided"] == found["outer"] == strided
        assert found["all"] == (rank, [0, 1, 2, 3], None, ((0, 1, 2, 3),))
        assert found["single"] == (0, None, [0, 1, 2, 3], ((0,), (1,), (2,), (3,)))
        pair = sorted((rank, 3 - rank))
        assert found["custom"] == (pair.index(rank), pair, [0, 1] if rank < 2 else [2, 3], crossed)
        assert found["three"] == "ep_size=3: it does not divide the 4 process(es) of this launch: use one of 1, 2, 4."
        assert found["large stride"] == (
            "ep_stride=2: it does not divide the 1 EP group(s) of 4 among 4 process(es): use one of 1."
        )
        assert found["missing rank"].startswith("ranks: makes groups [], [0, 1], [2] of 4 process(es). Give every")
        for wrong in ("unequal sizes", "invalid ranks", "repeated rank", "unequal arguments", "mesh"):
            assert found[wrong].startswith("ranks: makes groups ")
            assert found[wrong] == ranks[0][wrong]
        assert "give no ep_size and no ep_stride" in found["size and ranks"]
        assert found["stride and ranks"] == found["size and ranks"]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_strided_partition_has_every_rank_once_at_equal_distances(ep_size: int, stride: int, blocks: int):
    world = ep_size * stride * blocks
    partition = strided_partition(world, ep_size, stride)
    assert sorted(rank for group in partition for rank in group) == list(range(world))
    assert list(partition) == sorted(partition)
    assert all(tuple(range(group[0], group[-1] + 1, stride)) == group for group in partition)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_partition_of_accepts_partitions_into_equal_groups_only(size: int, groups: int, data: st.DataObject):
    world = size * groups
    order = data.draw(st.permutations(range(world)))
    partition = tuple(sorted(tuple(sorted(order[first : first + size])) for first in range(0, world, size)))
    group_of_rank = [list(next(group for group in partition if rank in group)) for rank in range(world)]
    assert partition_of(group_of_rank) == partition
    rank = data.draw(st.integers(0, world - 1))
    other = data.draw(st.lists(st.integers(0, world), max_size=5).map(sorted))
    if other != group_of_rank[rank]:
        group_of_rank[rank] = other
        with pytest.raises(UserError, match=r"ranks: makes groups"):
            partition_of(group_of_rank)
