"""Migration between processes and between slots of one process. `tests/parity` trains with it, also on GPUs."""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from benchmarks.support.peak_memory import peak_bytes
from benchmarks.support.processes import run_distributed
from tests.experts.placement.placements import random_placement
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.moving.migrate import migrate, place_experts
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, contiguous
from toolkit.experts.placement.traffic import migration_cost

OPTIMIZERS = {
    "adamw": lambda parameters: AdamW(parameters, foreach=True),
    "adamw, fused": lambda parameters: AdamW(parameters, fused=True, amsgrad=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": Adafactor,
}


def make_stack(placement, groups, optimizer_name, sizes=(4, 3)) -> tuple[ExpertStack, Optimizer]:
    """Return a stack with parameters of several dtypes, and an optimizer after a step; each row has other values."""
    slots, (wide, narrow) = len(placement.slots[groups.ep_rank]), sizes
    dtypes = [torch.float32] * 3  # fused AdamW supports one dtype only
    if optimizer_name != "adamw, fused":
        dtypes = [torch.float32, torch.bfloat16, torch.float64]
    shapes = {"up": (wide, narrow), "down": (narrow, wide), "scale": (2, 1)}
    parameters = {
        name: nn.Parameter(torch.empty(slots, *shape, dtype=dtype))
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }
    optimizer = OPTIMIZERS[optimizer_name](list(parameters.values()))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stack = ExpertStack(parameters, placement, groups)
    expected = expected_rows(stack, optimizer, placement)
    for name, tensor in tensors_of(stack, optimizer).items():
        tensor.data.copy_(expected[name])
    return stack, optimizer


def tensors_of(stack: ExpertStack, optimizer: Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(stack.parameters)
    for name, parameter in stack.parameters.items():
        states = optimizer.state[parameter].items()
        found |= {f"{name}.{key}": value for key, value in states if value is not None and value.ndim}
    return found


def expected_rows(stack: ExpertStack, optimizer: Optimizer, placement: ExpertPlacement) -> dict[str, Tensor]:
    """Return each tensor of this rank under `placement`: noise by name and expert, zeros in rows without values."""
    here = stack.groups.ep_rank
    expected = {}
    for name, tensor in tensors_of(stack, optimizer).items():
        expected[name] = torch.zeros_like(tensor)
        for slot, expert in enumerate(placement.slots[here]):
            if expert == EMPTY_ROW or ("." in name and placement.owner(expert).rank != here):
                continue
            draws = torch.Generator().manual_seed(zlib.crc32(f"{name}/{expert}".encode()))
            expected[name][slot] = torch.randn(tensor.shape[1:], generator=draws, dtype=torch.float64).to(tensor.dtype)
    return expected


def check_rows(stack: ExpertStack, optimizer: Optimizer, placement: ExpertPlacement) -> None:
    assert stack.placement == placement
    for name, expected in expected_rows(stack, optimizer, placement).items():
        actual = tensors_of(stack, optimizer)[name]
        assert torch.equal(actual.detach().view(torch.uint8), expected.view(torch.uint8)), name


@contextmanager
def bytes_on_the_wire() -> Iterator[list[int]]:
    """Collect the sizes of this rank's point-to-point sends."""
    sizes: list[int] = []
    original = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        sizes.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return original(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counted):
        yield sizes


def migrate_and_check(stack: ExpertStack, new: ExpertPlacement, optimizer: Optimizer) -> None:
    """Migrate; check rows, storages, scalars and bytes."""
    old = stack.placement
    storages = {name: tensor.data_ptr() for name, tensor in tensors_of(stack, optimizer).items()}
    scalars = [v.clone() for state in optimizer.state.values() for v in state.values() if v is not None and not v.ndim]
    with bytes_on_the_wire() as sizes:
        report = migrate(stack, new, optimizer)
    check_rows(stack, optimizer, new)
    assert all(parameter.grad is None for parameter in stack.parameters.values())
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(stack, optimizer).items()} == storages
    assert scalars == [v for state in optimizer.state.values() for v in state.values() if v is not None and not v.ndim]

    row = {name: tensor[0].nbytes for name, tensor in tensors_of(stack, optimizer).items()}
    weights = sum(size for name, size in row.items() if "." not in name)
    states = sum(row.values()) - weights
    assert report.cost == migration_cost(old, new, weight_bytes=weights, optimizer_bytes=states)
    sent = torch.tensor([sum(sizes)])
    if stack.groups.ep_group is not None:
        dist.all_reduce(sent, group=stack.groups.ep_group)
    assert report.cost.bytes == sent


def there_and_back(ep_size: int) -> None:
    groups = make_expert_groups(ep_size)
    for seed in range(12):
        rng = random.Random(seed)
        slots = [rng.randint(1, 6) for _ in range(ep_size)]
        experts = sum(slots) if seed % 2 else rng.randint(1, sum(slots))
        old, new = random_placement(rng, slots, experts), random_placement(rng, slots, experts)
        stack, optimizer = make_stack(old, groups, list(OPTIMIZERS)[seed // 2 % len(OPTIMIZERS)])
        migrate_and_check(stack, new, optimizer)
        migrate_and_check(stack, old, optimizer)


@pytest.mark.parametrize(("world", "ep_size"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_migrate_there_and_back_puts_every_row_in_its_slot(world: int, ep_size: int) -> None:
    run_distributed(there_and_back, world, ep_size)


def edge_cases() -> str:
    groups = make_expert_groups(2)
    stack, optimizer = make_stack(ExpertPlacement(((0, 1), ())), groups, "adamw")
    new = ExpertPlacement(((1, 0), ()))
    migrate(stack, new, optimizer)
    check_rows(stack, optimizer, new)

    # Optimizer rows of expert 0 go to rank 1, which already has its weights.
    stack, optimizer = make_stack(ExpertPlacement(((0, 2), (0, 1))), groups, "adamw")
    new = ExpertPlacement(((EMPTY_ROW, 2), (0, 1)))
    with bytes_on_the_wire() as sizes:
        report = migrate(stack, new, optimizer)
    check_rows(stack, optimizer, new)
    assert report.cost.weight_bytes == 0 < report.cost.optimizer_bytes
    assert sum(sizes) == (report.cost.bytes if dist.get_rank() == 0 else 0)

    up = stack.parameters["up"]
    rows = {expert: stack.row(up, expert) for expert in range(3)}
    assert {expert for expert, row in rows.items() if row is not None} == ({0, 1} if dist.get_rank() else {2})
    with torch.no_grad():
        for expert, row in rows.items():
            if row is not None:
                row.fill_(expert)
    assert up[:, 0, 0].tolist() == ([0, 1] if dist.get_rank() else [0, 2])
    for tensor, expert in ((up, 3), (up, EMPTY_ROW), (up[:1], 0)):
        with pytest.raises(UserError, match="expert: "):
            stack.row(tensor, expert)

    stack, optimizer = make_stack(contiguous(4, 2), groups, "adamw")
    new = [ExpertPlacement(((2, 1), (0, 3))), ExpertPlacement(((3, 1), (2, 0)))][dist.get_rank()]
    with pytest.raises(ValueError, match="ranks disagree on the placement") as caught:
        migrate(stack, new, optimizer)
    return str(caught.value)


def test_migrate_with_an_empty_rank_an_owner_change_and_unequal_plans() -> None:
    first, second = run_distributed(edge_cases, 2)
    assert first == second


def peak_of_migration(ep_size: int) -> tuple[int, int]:
    """Return the peak of bytes that torch allocates to migrate all experts, and the bytes of one expert's rows."""
    rng = random.Random(3)
    old, new = contiguous(8 * ep_size, ep_size), random_placement(rng, [8] * ep_size, 8 * ep_size)
    stack, optimizer = make_stack(old, make_expert_groups(ep_size), "adamw", sizes=(256, 128))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        migrate(stack, new, optimizer)
    return peak_bytes(profile), sum(tensor[0].nbytes for tensor in tensors_of(stack, optimizer).values())


@pytest.mark.parametrize("world", [2, 4])
def test_migrate_needs_the_memory_of_at_most_two_experts(world: int) -> None:
    for peak, one_expert in run_distributed(peak_of_migration, world, world):
        assert one_expert <= peak <= 2 * one_expert, "a permutation of all experts needs the buffer"


def test_migrate_with_other_slots_or_optimizer_states_without_rows_raises() -> None:
    stack, optimizer = make_stack(contiguous(4, 1), ExpertGroups(), "adamw")
    with pytest.raises(UserError, match=r"placement: 4 experts in \[5\] slots, the layer has 4 in \[4\]"):
        migrate(stack, contiguous(4, 1, slots_per_rank=5), optimizer)
    with pytest.raises(UserError, match="placement: 3 experts in"):
        migrate(stack, contiguous(3, 1, slots_per_rank=4), optimizer)
    optimizer.state[stack.parameters["up"]]["absmax"] = torch.zeros(7)
    with pytest.raises(UserError, match=r"'absmax' of 'up' has shape \(7,\).* Use an optimizer such as AdamW"):
        migrate(stack, ExpertPlacement(((1, 0, 2, 3),)), optimizer)


def test_place_experts_without_a_matching_layer_raises() -> None:
    model = nn.Sequential(make_moe(4, 8, num_experts=4, top_k=2))
    with pytest.raises(UserError, match=r"placement: 4 experts in \[5\] slots"):
        place_experts(model, contiguous(4, 1, slots_per_rank=5), None)
    with pytest.raises(UserError, match="has no experts that can move"):
        place_experts(nn.Linear(2, 2), contiguous(4, 1), None)
