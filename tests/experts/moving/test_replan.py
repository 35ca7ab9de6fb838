"""What planners are told in training: counted over ranks and windows, across a stop."""

from __future__ import annotations

import math
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import run_distributed
from tests.support.placements import by_slot
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.routing_log import sample_forwards
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners import PLANNERS
from toolkit.train.callbacks.replan import Replan

EXPERTS, DIM, TOKENS = 4, 5, 12


def a_layer(ep_size: int, stride: int = 1) -> MoE:
    torch.manual_seed(0)
    layer = make_moe(DIM, 6, EXPERTS, 2, groups=make_expert_groups(ep_size, ep_stride=stride))
    layer.router.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    return layer


def step(layer: MoE, number: int) -> torch.Tensor:
    """One training forward of this rank's tokens; returns what all ranks chose, rank by rank (W, T, K)."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    x_WTD = torch.randn(world, TOKENS, DIM, generator=torch.Generator().manual_seed(number))
    layer(x_WTD[rank])
    with torch.no_grad():
        return torch.stack([layer.router(x_TD).expert_ids_TK for x_TD in x_WTD])


def told(stop: bool, ep_size: int, stride: int) -> tuple[Any, Any]:
    """The load of the planner's second window of two steps, and the expected load; with a stop in between."""
    heard: list[Any] = []

    def listen(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:
        heard.append(load_E)
        return current

    def replanner_of(layer: MoE) -> Replanner:
        return Replanner(expert_stacks(layer), ReplanOptions(planner=listen, every=2, guarded=False))

    layer, optimizer = a_layer(ep_size, stride), torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    replanner = replanner_of(layer)
    chosen = []
    for number in range(4):
        chosen.append(step(layer, number))
        replanner.after_step(number + 1, optimizer)
        if stop and number == 2:
            state = replanner.state_dict()
            layer = a_layer(ep_size, stride)
            replanner = replanner_of(layer)
            replanner.load_state_dict(state)
    ids_PTK = torch.cat(chosen[2:], dim=1)
    groups = len(ids_PTK) // ep_size
    return heard[-1], ids_PTK.flatten().bincount(minlength=EXPERTS).numpy() / (2 * groups)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize(("world", "ep_size", "stride"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_replanner_gives_the_planner_the_mean_load_of_its_window(
    world: int, ep_size: int, stride: int, stop: bool
) -> None:
    for heard, expected in run_distributed(told, world, stop, ep_size, stride):
        np.testing.assert_allclose(heard, expected)


def sampled(ep_size: int, stride: int) -> tuple[Any, Any, int]:
    """The choices of the last forward that a guard hears, of five tokens of each rank; all choices; bytes of a row."""
    layer = a_layer(ep_size, stride)
    for number in range(2):
        chosen = step(layer, number)
    (sample,) = sample_forwards([layer.expert_stack.log], 5)
    assert sample is not None
    return sample.choices_PTK, chosen.numpy(), sample.row_bytes


@pytest.mark.parametrize(("world", "ep_size", "stride"), [(1, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_sample_forwards_gives_the_last_choices_of_all_ranks(world: int, ep_size: int, stride: int) -> None:
    for heard, chosen, row_bytes in run_distributed(sampled, world, ep_size, stride):
        place = np.arange(world) // stride % ep_size
        wanted = np.stack([np.concatenate(chosen[place == rank, :5]) for rank in range(ep_size)])
        np.testing.assert_array_equal(heard, wanted)
        assert row_bytes == 2 * 4 * DIM + 2 * (4 + 2)  # with two weights, and half of two slots


def guarded_rates() -> tuple[CostModel, int]:
    """The rates of a guard whose clock advances by a second at each look, and the rows of this rank's experts."""
    layer = a_layer(dist.get_world_size() if dist.is_initialized() else 1)
    optimizer = torch.optim.SGD(layer.parameters())
    replanner = Replanner(expert_stacks(layer), ReplanOptions(planner="lpt", every=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.experts.parallel.waits.time.perf_counter", map(float, count()).__next__)
        step(layer, 1)
        replanner.after_step(1, optimizer)
    (guard,) = replanner.guards.values()
    return guard.cost_model, TOKENS * 2


def test_guard_measures_the_time_of_rows_and_the_link() -> None:
    alone, rows = guarded_rates()
    assert alone.seconds_per_row == pytest.approx(3 / rows)  # one look before the experts, one after
    assert alone.bytes_per_second == math.inf
    for rates, rows in run_distributed(guarded_rates, 2):
        assert rates.seconds_per_row == pytest.approx(3 / rows)
        assert rates.bytes_per_second == 2**21  # one second for half of 4 MiB


def test_replanner_without_a_guard_keeps_no_times() -> None:
    layer = a_layer(1)
    replanner = Replanner(expert_stacks(layer), ReplanOptions(planner="lpt", every=100, guarded=False))
    for number in (1, 2):
        step(layer, number)
        replanner.after_step(number, torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    assert replanner._ends == []
    assert layer.expert_stack.timing is None


def plans_that_do_not_pay() -> tuple[list[Any], dict[str, Any]]:
    """`moe/plans_refused` at each log step, and the results, where plans save nothing and each window has one."""
    layer, optimizer = a_layer(1), torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    swapped = by_slot((1, 0, 2, 3), 1)

    def swap(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:  # noqa: ARG001
        return swapped

    replan = Replan(layer, ReplanOptions(planner=swap, every=4))
    lines: list[Any] = []
    trainer: Any = SimpleNamespace(optimizer=optimizer, results={}, state=SimpleNamespace(step=0))
    trainer.record = lambda name, value: lines.append(value) if name == "moe/plans_refused" else None
    for number in range(1, 17):
        step(layer, number)
        trainer.state.step, trainer.at_log_step = number, number % 8 == 0
        replan.on_step_end(trainer)
    return lines, trainer.results


def test_refused_plans_are_counted_and_the_first_is_explained(capsys: pytest.CaptureFixture[str]):
    lines, results = plans_that_do_not_pay()
    assert lines == [2, 2]
    assert results["plans_refused"] == 4
    (only,) = capsys.readouterr().out.splitlines()
    assert only.startswith("step 4: the guard rejects a plan for ")


def test_replanner_without_a_planner_exchanges_experts() -> None:
    assert Replanner(expert_stacks(a_layer(1)), ReplanOptions()).planner is PLANNERS["swap"]


def test_replanner_with_a_planner_by_module_and_function_imports_it() -> None:
    options = ReplanOptions(planner="toolkit.experts.placement.planners.simple:lpt")
    assert Replanner(expert_stacks(a_layer(1)), options).planner is PLANNERS["lpt"]
    with pytest.raises(UserError, match="planner='math:no_such': cannot be imported"):
        Replanner(expert_stacks(a_layer(1)), ReplanOptions(planner="math:no_such"))
