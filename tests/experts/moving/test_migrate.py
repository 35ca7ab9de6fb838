"""Migration on real processes: what every slot holds afterwards, byte for byte, and what travelled to get it there."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from tests.experts.placement.placements import random_placement
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import peak_bytes, run_distributed
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.moving.migrate import MigrationReport, migrate, place_experts
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import is_owned, ownership_of
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, contiguous
from toolkit.experts.placement.traffic import migration_cost

OPTIMIZERS = {
    "adamw": lambda parameters: AdamW(parameters, foreach=True),
    "adamw, fused": lambda parameters: AdamW(parameters, fused=True, amsgrad=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": Adafactor,
}


def make_stack(
    placement: ExpertPlacement, groups: ExpertGroups, optimizer_name: str, sizes: tuple[int, int] = (4, 3)
) -> tuple[ExpertStack, Optimizer]:
    """Weights of two types, optimizer states as after a step; every row has content of its own."""
    slots, (wide, narrow) = len(placement.slots[groups.ep_rank]), sizes
    parameters = {
        "up": nn.Parameter(torch.empty(slots, wide, narrow)),
        "down": nn.Parameter(torch.empty(slots, narrow, wide, dtype=torch.bfloat16)),
    }
    if optimizer_name != "adamw, fused":  # which wants one type
        parameters["scale"] = nn.Parameter(torch.empty(slots, 2, 1, dtype=torch.float64))
    else:
        parameters["down"] = nn.Parameter(torch.empty(slots, narrow, wide))
    optimizer = OPTIMIZERS[optimizer_name](list(parameters.values()))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stack = ExpertStack(parameters, placement, groups)
    expected = expected_rows(stack, optimizer, placement)
    with torch.no_grad():
        for name, tensor in tensors_of(stack, optimizer).items():
            tensor.copy_(expected[name])
    return stack, optimizer


def tensors_of(stack: ExpertStack, optimizer: Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(stack.parameters)
    for name, parameter in stack.parameters.items():
        states = optimizer.state[parameter].items()
        found |= {f"{name}.{key}": value for key, value in states if value is not None and value.ndim}
    return found


def expected_rows(stack: ExpertStack, optimizer: Optimizer, placement: ExpertPlacement) -> dict[str, Tensor]:
    """What each tensor of this rank holds under `placement`: noise by name and expert, zeros where nothing is due."""
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
    """The sizes of all that this rank sends to single ranks meanwhile, taken where torch is asked to send it."""
    sizes: list[int] = []
    original = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        sizes.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return original(operations)

    dist.batch_isend_irecv = counted
    try:
        yield sizes
    finally:
        dist.batch_isend_irecv = original


def migrate_and_check(stack: ExpertStack, new: ExpertPlacement, optimizer: Optimizer) -> None:
    """Migrate, and compare rows, storages, scalars and bytes with what must be."""
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


def there_and_back(ep_size: int, seeds: int) -> None:
    groups = make_expert_groups(ep_size)
    for seed in range(seeds):
        rng = random.Random(seed)
        slots = [rng.randint(1, 6) for _ in range(ep_size)]
        experts = sum(slots) if seed % 2 else rng.randint(1, sum(slots))
        old, new = random_placement(rng, slots, experts), random_placement(rng, slots, experts)
        stack, optimizer = make_stack(old, groups, list(OPTIMIZERS)[seed // 2 % len(OPTIMIZERS)])
        migrate_and_check(stack, new, optimizer)
        migrate_and_check(stack, old, optimizer)


@pytest.mark.parametrize(("world", "ep_size"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_migrate_there_and_back_puts_every_row_in_its_slot(world: int, ep_size: int) -> None:
    run_distributed(there_and_back, world, ep_size, 12)


def ranks_without_slots() -> None:
    old, new = ExpertPlacement(((0, 1), ())), ExpertPlacement(((1, 0), ()))
    stack, optimizer = make_stack(old, make_expert_groups(2), "adamw")
    migrate(stack, new, optimizer)
    check_rows(stack, optimizer, new)


def test_migrate_with_a_rank_without_slots() -> None:
    run_distributed(ranks_without_slots, 2)


def the_owner_passes() -> tuple[MigrationReport, int]:
    old, new = ExpertPlacement(((0, 2), (0, 1))), ExpertPlacement(((-1, 2), (0, 1)))
    stack, optimizer = make_stack(old, make_expert_groups(2), "adamw")
    with bytes_on_the_wire() as sizes:
        report = migrate(stack, new, optimizer)
    check_rows(stack, optimizer, new)
    return report, sum(sizes)


def test_migrate_to_another_owner_sends_optimizer_rows_only() -> None:
    (first, sent), (second, other) = run_distributed(the_owner_passes, 2)
    assert first.cost == second.cost
    assert first.cost.weight_bytes == 0 < first.cost.optimizer_bytes
    assert (sent, other) == (first.cost.bytes, 0)


# --- training ----------------------------------------------------------------------------------------------------


def all_gather_object(mine: object) -> list:
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts


def losses_and_weights(ep_size: int, every: int | None, copies: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Clipped AdamW steps of a router and six experts, all of which move every so many steps."""
    groups, rng = make_expert_groups(ep_size), random.Random(5)
    slots, experts, world = [12 // ep_size if copies else 6 // ep_size] * ep_size, 6, dist.get_world_size()
    layer = make_moe(8, 16, experts, 2, groups=groups, placement=random_placement(rng, slots, experts))
    nn.init.normal_(layer.router.weight, generator=torch.Generator().manual_seed(1))
    optimizer = AdamW(layer.parameters(), lr=0.02)
    sync = ExpertSync(layer.parameters())
    losses = []
    for step in range(12):
        draws = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x, y = torch.randn(10, 8, generator=draws), torch.randn(10, 8, generator=draws)
        loss = (layer(x) - y).square().mean()
        loss.backward()
        sync.before_clip()
        for parameter in layer.parameters():
            if not is_owned(parameter):
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        sync.clip(layer.parameters(), 0.1)
        optimizer.step()
        sync.after_step(step, optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
        if every and (step + 1) % every == 0:
            migrate(layer.expert_stack, random_placement(rng, slots, experts), optimizer)
    held = {
        f"{name}/{row_id}": parameter.detach()[row]
        for name, parameter in layer.expert_stack.parameters.items()
        for row, row_id in enumerate(ownership_of(parameter).row_ids)
        if ownership_of(parameter).owns[row]
    }
    weights = {"router": layer.router.weight.detach()}
    for part in all_gather_object(held):
        weights |= part
    return losses, weights


def compare_with_staying(ep_size: int, copies: bool) -> None:
    with in_float64():
        stayed, weights = losses_and_weights(ep_size, None, copies)
        moved, moved_weights = losses_and_weights(ep_size, 2, copies)
    assert moved == pytest.approx(stayed, rel=IN_FLOAT64)
    assert stayed[-1] != pytest.approx(stayed[0], rel=1e-2), "nothing was learned"
    assert len(weights) == 2 * 6 + 1
    torch.testing.assert_close(moved_weights, weights, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("world", "ep_size", "copies"), [(2, 2, False), (4, 2, True), (3, 3, True)])
def test_migrate_every_two_steps_keeps_losses_and_weights(world: int, ep_size: int, copies: bool) -> None:
    run_distributed(compare_with_staying, world, ep_size, copies)


# --- memory ------------------------------------------------------------------------------------------------------


def peak_beyond_what_was_there(ep_size: int) -> tuple[int, int]:
    """Most bytes allocated by torch at one time within a migration of all experts; bytes of one expert's rows."""
    rng = random.Random(3)
    old, new = contiguous(8 * ep_size, ep_size), random_placement(rng, [8] * ep_size, 8 * ep_size)
    stack, optimizer = make_stack(old, make_expert_groups(ep_size), "adamw", sizes=(256, 128))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        migrate(stack, new, optimizer)
    return peak_bytes(profile), sum(tensor[0].nbytes for tensor in tensors_of(stack, optimizer).values())


@pytest.mark.parametrize("world", [2, 4])
def test_migrate_needs_the_memory_of_at_most_two_experts(world: int) -> None:
    for peak, one_expert in run_distributed(peak_beyond_what_was_there, world, world):
        assert one_expert <= peak <= 2 * one_expert, "a permutation of all experts needs the buffer"


# --- what is refused ---------------------------------------------------------------------------------------------


def test_migrate_to_other_slots_or_experts_raises() -> None:
    stack, optimizer = make_stack(contiguous(4, 1), ExpertGroups(), "adamw")
    with pytest.raises(UserError, match=r"placement: 4 experts in \[5\] slots, the layer has 4 in \[4\]"):
        migrate(stack, contiguous(4, 1, slots_per_rank=5), optimizer)
    with pytest.raises(UserError, match="placement: 3 experts in"):
        migrate(stack, contiguous(3, 1, slots_per_rank=4), optimizer)


def test_place_experts_without_a_place_for_them_raises() -> None:
    model = nn.Sequential(make_moe(4, 8, num_experts=4, top_k=2))
    with pytest.raises(UserError, match=r"placement: 4 experts in \[5\] slots"):
        place_experts(model, contiguous(4, 1, slots_per_rank=5), None)
    with pytest.raises(KeyError):
        place_experts(model, {"1": contiguous(4, 1)}, None)
    with pytest.raises(UserError, match="has no experts that can move"):
        place_experts(nn.Linear(2, 2), contiguous(4, 1), None)


def test_migrate_with_optimizer_state_without_rows_raises() -> None:
    stack, optimizer = make_stack(contiguous(4, 1), ExpertGroups(), "adamw")
    optimizer.state[stack.parameters["up"]]["absmax"] = torch.zeros(7)
    with pytest.raises(UserError, match=r"'absmax' of 'up' has shape \(7,\).* Use an optimizer such as AdamW"):
        migrate(stack, ExpertPlacement(((1, 0, 2, 3),)), optimizer)


def disagree() -> str:
    stack, optimizer = make_stack(contiguous(4, 2), make_expert_groups(2), "adamw")
    new = [ExpertPlacement(((2, 1), (0, 3))), ExpertPlacement(((3, 1), (2, 0)))][dist.get_rank()]
    with pytest.raises(ValueError, match="ranks disagree on the placement") as caught:
        migrate(stack, new, optimizer)
    return str(caught.value)


def test_migrate_with_ranks_that_disagree_raises() -> None:
    first, second = run_distributed(disagree, 2)
    assert first == second
