"""Owned parameters: averaging, clipping, penalties and process groups, compared with plain torch."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.processes import free_port, run_distributed
from tests.parity.models import DIM, RoutedExperts
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel import gradient_average
from toolkit.experts.parallel.collectives import rank, world_size
from toolkit.experts.parallel.ddp import refuse_late_parameters
from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import Ownership, mark_owned
from toolkit.experts.parallel.penalty import parameter_penalty
from toolkit.experts.parallel.sync import ExpertSync, clip_gradients
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.sharding.shard import shard_experts
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.integrations.accelerate.prepare import prepare

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def parameter(*values: float) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(len(values)))
    p.grad = torch.tensor(values)
    return p


def outlive_groups(times: int) -> int:
    """Free models after their process group, while its threads still free the last collective's tensors."""
    sys.setswitchinterval(100)  # this thread releases the GIL only when it waits
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


def test_model_freed_after_its_process_group_does_not_hang():
    assert run_distributed(outlive_groups, 1, 30, timeout_s=60) == [30]


SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from accelerate import Accelerator
from toolkit.integrations.accelerate.prepare import prepare

for rank in ("0", "1"):  # forks that import nothing again and end as programs do
    if not os.fork():
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        break
else:
    sys.exit(any([os.wait()[1], os.wait()[1]]))

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
many = [torch.ones(1) for _ in range(5_000)]
dist.all_reduce_coalesced(many)
sys.setswitchinterval(1000)  # gloo's thread, which frees the tensors of the next collective, waits for the GIL
dist.all_reduce_coalesced(many)
print("ended with", accelerator.num_processes)
"""


def test_script_that_exits_right_after_a_collective_is_not_aborted():
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-u", "-W", "ignore", "-c", SCRIPT],
        env=os.environ | launched | {"ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout == "ended with 2\n" * 2


def test_owns_empty_row_is_false():
    assert Ownership((3, EMPTY_ROW), ExpertGroups()).owns == (True, False)


def averaged(ep_size: int) -> list[list[float]]:
    """Average owned gradients: (r, 10 r) of rank r, which is not contiguous, none, (100 r), and (r) of some ranks."""
    rank, groups = dist.get_rank(), make_expert_groups(ep_size)
    parameters = [parameter(1.0 * rank, 10.0 * rank), parameter(1.0), parameter(100.0 * rank), parameter(1.0 * rank)]
    for p in parameters:
        mark_owned(p, row_ids=range(len(p)), groups=groups)
    parameters[0].grad = parameters[0].grad.repeat_interleave(2)[::2]
    parameters[1].grad = None
    if rank < 2:  # skipped the layer
        parameters[3].grad = None
    GradientAverage(parameters).finish()
    assert parameters.pop(1).grad is None
    return [p.grad.tolist() for p in parameters]


def test_before_clip_averages_over_the_expert_data_parallel_group():
    # Groups {0, 2} and {1, 3}.
    even, odd = [[1, 10], [100], [1]], [[2, 20], [200], [1.5]]
    assert run_distributed(averaged, 4, 2) == [even, odd, even, odd]


def replaces_ddp() -> bool:
    make = DistributedDataParallel.__init__
    make_moe(4, 6, 4, 2, groups=make_expert_groups(world_size()))
    return DistributedDataParallel.__init__ is not make


@pytest.mark.parametrize("world", [1, 2])
def test_ddp_is_replaced_with_sharded_experts_only(world: int):
    assert run_distributed(replaces_ddp, world) == [world > 1] * world


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(make_moe(4, 6, 4, 2), RoutedExperts(4, 4)).double()


def placement_of(ep_size: int, replicas: bool) -> Callable[..., ExpertPlacement]:
    rows = [[*range(4)[at::ep_size], *([(at + 1) % 4] if replicas else [])] for at in range(ep_size)]
    return lambda *_: ExpertPlacement(tuple(map(tuple, rows)))


def penalized_step(ep_size: int, replicas: bool) -> tuple[float, float, dict[str, Tensor]]:
    """Return penalty, gradient norm and weights after a clipped SGD step of a model with another seed on each rank."""
    model = build(rank())
    shard_experts(model, make_expert_groups(ep_size), placement=placement_of(ep_size, replicas))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    sync = ExpertSync(model, optimizer)
    loss_of = DistributedDataParallel(model) if world_size() > 1 else model
    penalty = parameter_penalty(lambda p: 0.5 * p.square(), parameters)
    (loss_of(X.chunk(world_size())[rank()]).square().mean() + penalty).backward()
    norm = sync.clip(parameters, 0.5)
    optimizer.step()
    return penalty.item(), norm.item(), whole_state_dict(model)


@pytest.mark.parametrize(("world", "ep_size", "replicas"), [(1, 1, False), (2, 2, False), (4, 2, True)])
def test_step_with_parameter_penalty_and_clip_equals_plain_torch(world: int, ep_size: int, replicas: bool):
    model = build()
    penalty = 0.5 * sum(p.square().sum() for p in model.parameters())
    (model(X).square().mean() + penalty).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    weights = {name: (p - 0.1 * p.grad).detach() for name, p in model.named_parameters()}
    ranks = run_distributed(penalized_step, world, ep_size, replicas)
    for found_penalty, found_norm, _ in ranks:
        assert (found_penalty, found_norm) == pytest.approx((penalty.item(), norm.item()), rel=1e-12)
    for name, expected in weights.items():
        torch.testing.assert_close(ranks[0][2][name], expected, rtol=1e-12, atol=1e-14)


def penalize_by_a_scalar() -> str | None:
    model = make_moe(4, 6, 4, 2, groups=make_expert_groups(2))
    with pytest.raises(UserError) as caught:
        parameter_penalty(lambda p: p.square().sum(), model.experts.parameters())
    return caught.value.field


def test_parameter_penalty_of_sharded_experts_raises_for_a_scalar():
    assert run_distributed(penalize_by_a_scalar, 2) == ["function(parameter).shape"] * 2


def test_clip_with_a_nan_norm_makes_all_gradients_nan():
    finite, nan = parameter(3.0), parameter(float("nan"))
    clip_gradients([finite, nan], 1.0)
    assert finite.grad.isnan().all()


def test_parameters_added_after_prepare_raise():
    model = nn.Sequential(nn.Linear(1, 1))
    prepared = list(model.parameters())
    refuse_late_parameters(model, prepared)
    model.append(nn.Linear(1, 1).requires_grad_(False))
    refuse_late_parameters(model, prepared)
    model.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"parameter '2\.weight' was added after the model was prepared"):
        refuse_late_parameters(model, prepared)


def begun_in_backward_passes() -> list[int]:
    """Return how many buckets began during the backward pass of each of three steps, the second without averaging."""
    model = nn.Sequential(*(RoutedExperts() for _ in range(3)))
    shard_experts(model, make_expert_groups(2))
    wrapped, optimizer = prepare(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1))
    with mock.patch.object(gradient_average, "BUCKET_BYTES", 0):
        sync = ExpertSync(model, optimizer, prepared=wrapped)
    found = []
    for step in range(3):
        with wrapped.no_sync() if step == 1 else nullcontext():
            wrapped(torch.randn(4, DIM)).sum().backward()
        found.append(sync._average._begun)
        sync.clip(model.parameters(), None)
        optimizer.zero_grad()
    return found


def test_expert_gradients_are_averaged_during_the_backward_pass():
    for first, without, third in run_distributed(begun_in_backward_passes, 4):
        assert first == without == 0
        assert third > 0
