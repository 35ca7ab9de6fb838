"""The seam for owned parameters, piece by piece. What it is for stands in `tests/traps/`."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.equality import replicas_agree
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.collectives import rank, world_size
from toolkit.experts.parallel.ddp import refuse_late_parameters
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import Ownership, mark_owned
from toolkit.experts.parallel.penalty import parameter_penalty
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.sharding.shard import shard_experts
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.integrations.accelerate.prepare import prepare

ALONE = ExpertGroups()


def parameter(*values: float) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(len(values)))
    p.grad = torch.tensor(values)
    return p


# --- groups -----------------------------------------------------------------------------------------------------------


def outlive_groups(times: int) -> int:
    """Models that outlive their process groups, whose threads are still freeing the last collective's tensors."""
    sys.setswitchinterval(100)  # this thread gives Python's lock away only where it waits
    model = nn.Linear(1, 1)
    for _ in range(times):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        optimizer = torch.optim.SGD(model.parameters())
        wrapped, _ = prepare(Accelerator(cpu=True), model, optimizer)
        assert wrapped is not model
        dist.all_gather([torch.zeros(1)], torch.ones(1))
        dist.destroy_process_group()
        del wrapped
        gc.collect()
        AcceleratorState._reset_state(reset_partial_state=True)
    return times


def test_a_model_may_outlive_its_process_group():
    """Was a hang at the end of a run, of a process that had nothing left to do but to free its model."""
    assert run_distributed(outlive_groups, 1, 30, timeout_s=60) == [30]


def test_owns_empty_row_is_false():
    assert Ownership((3, EMPTY_ROW), ExpertGroups()).owns == (True, False)


# --- averaging --------------------------------------------------------------------------------------------------------


def averaged(ep_size: int) -> list[list[float]]:
    """Two owned parameters; rank r's first gradient is (r, 10 r), its second (100 r)."""
    rank, groups = dist.get_rank(), make_expert_groups(ep_size)
    first, second = parameter(1.0 * rank, 10.0 * rank), parameter(100.0 * rank)
    for p in (first, second):
        mark_owned(p, row_ids=range(len(p)), groups=groups)
    first.grad = first.grad.repeat_interleave(2)[::2]  # not contiguous
    ExpertSync([first, second]).before_clip()
    return [p.grad.tolist() for p in (first, second)]


def test_before_clip_takes_the_mean_over_the_expert_data_parallel_group_only():
    # Groups {0, 2} and {1, 3}.
    even, odd = [[1, 10], [100]], [[2, 20], [200]]
    assert run_distributed(averaged, 4, 2) == [even, odd, even, odd]


def penalized_step(ep_size: int, replicas: bool) -> tuple[float, float, dict[str, Tensor]]:
    """The penalty, the norm and all weights after a step on a loss with an L2 penalty."""
    torch.manual_seed(0)
    model = nn.Sequential(make_moe(4, 6, 4, 2, groups=make_expert_groups(1))).double()
    rows = [[*range(4)[at::ep_size], *([(at + 1) % 4] if replicas else [])] for at in range(ep_size)]
    placement = ExpertPlacement(tuple(map(tuple, rows)))
    shard_experts(model, make_expert_groups(ep_size), placement=lambda *_: placement)
    sync, parameters = ExpertSync(model.parameters()), list(model.parameters())
    loss_of = DistributedDataParallel(model) if world_size() > 1 else model
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    penalty = parameter_penalty(lambda p: 0.5 * p.square(), parameters)
    (loss_of(x.chunk(world_size())[rank()]).square().mean() + penalty).backward()
    sync.before_clip()
    norm = sync.clip(parameters, 0.5)
    torch.optim.SGD(parameters, lr=0.1).step()
    return penalty.item(), norm.item(), whole_state_dict(model)


@pytest.mark.parametrize(
    ("world", "ep_size", "replicas"), [(2, 2, False), (2, 2, True), (4, 2, True), (4, 4, True), (4, 4, False)]
)
def test_parameter_penalty_has_the_value_and_gradient_of_one_process(world: int, ep_size: int, replicas: bool):
    ((penalty, norm, weights),) = run_distributed(penalized_step, 1, 1, False)
    found = run_distributed(penalized_step, world, ep_size, replicas)
    for other_penalty, other_norm, _ in found:
        assert (other_penalty, other_norm) == pytest.approx((penalty, norm), rel=1e-12)
    for name, expected in weights.items():
        torch.testing.assert_close(found[0][2][name], expected, rtol=1e-12, atol=1e-14)


def penalize_by_a_scalar() -> str | None:
    model = make_moe(4, 6, 4, 2, groups=make_expert_groups(2))
    with pytest.raises(UserError) as caught:
        parameter_penalty(lambda p: p.square().sum(), model.experts.parameters())
    return caught.value.field


def test_parameter_penalty_of_sharded_experts_raises_for_a_scalar():
    assert run_distributed(penalize_by_a_scalar, 2) == ["function(parameter).shape"] * 2


def averaged_with_a_missing_gradient() -> list[float] | None:
    rank, groups = dist.get_rank(), make_expert_groups(2)
    unused, used = parameter(1.0), parameter(2.0 * rank)
    for p in (unused, used):
        mark_owned(p, row_ids=[0], groups=groups)
    unused.grad = None
    ExpertSync([unused, used]).before_clip()
    return used.grad.tolist()


def test_a_parameter_without_gradient_is_passed_over():
    assert run_distributed(averaged_with_a_missing_gradient, 4) == [[2.0], [4.0], [2.0], [4.0]]
    ExpertSync([]).before_clip()


# --- clipping ---------------------------------------------------------------------------------------------------------


def test_a_nan_norm_makes_all_gradients_nan():
    finite, spoilt = parameter(3.0), parameter(float("nan"))
    ExpertSync([]).clip([finite, spoilt], 1.0)
    assert finite.grad.isnan().all()


def clipped(owned_only: bool) -> tuple[float, list[float]]:
    """Copied gradient (2, 1) on both ranks, owned (2) on rank 0 and (4) on rank 1: a norm of 5."""
    groups, rank = make_expert_groups(2), dist.get_rank()
    mine, replicated = parameter(2.0 + 2.0 * rank), parameter(2.0, 1.0)
    mark_owned(mine, row_ids=[rank], groups=groups)
    parameters = [mine] if owned_only else [replicated, mine]
    norm = ExpertSync([]).clip(parameters, 0.5).item()
    return norm, [value for p in parameters for value in p.grad.tolist()]


def test_replicated_gradients_count_once_and_owned_ones_are_summed():
    (norm, first), (same, second) = run_distributed(clipped, 2, False)
    assert norm == same == pytest.approx(5.0)
    assert first == pytest.approx([0.2, 0.1, 0.2], rel=1e-5)
    assert second == pytest.approx([0.2, 0.1, 0.4], rel=1e-5)
    (norm, first), (same, second) = run_distributed(clipped, 2, True)
    assert norm == same == pytest.approx(20**0.5)
    assert first[0] * 2 == pytest.approx(second[0])


# --- agreement --------------------------------------------------------------------------------------------------------


def agreement(kind: str) -> bool:
    rank, groups = dist.get_rank(), make_expert_groups(2)
    model = nn.Module()
    model.replicated, model.mine = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((1,), float(rank % 2)))
    mark_owned(model.mine, row_ids=[rank % 2], groups=groups)
    with torch.no_grad():
        if kind == "a copy drifted" and rank == 1:
            model.replicated[0] = torch.nextafter(torch.ones(()), torch.tensor(2.0))
        if kind == "a replica drifted" and rank == 3:
            model.mine += 1
    return replicas_agree(model)


def test_late_parameters_are_named():
    model = nn.Sequential(nn.Linear(1, 1))
    prepared = list(model.parameters())
    refuse_late_parameters(model, prepared)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    model.append(frozen)
    refuse_late_parameters(model, prepared)
    model.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"parameter '2\.weight' was added after the model was prepared"):
        refuse_late_parameters(model, prepared)
