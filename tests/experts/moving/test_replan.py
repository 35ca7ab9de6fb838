"""Inputs of planners and guards in training: loads and choices over ranks and windows, rates, and resumed windows."""

import math
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.support.processes import run_distributed
from tests.experts.models import make_layer
from tests.support.placements import by_slot
from toolkit.experts.layer.moe_layer import Experts, MoE
from toolkit.experts.layer.routing_log import sample_forwards
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel import collectives
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.loads import Window
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.placement.planners import PLANNERS
from toolkit.train.callbacks.replan import Replan

EXPERTS, DIM, TOKENS = 4, 5, 12
SIZES = (DIM, 6, EXPERTS, 2)
OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def forward(layer: MoE, number: int = 1) -> torch.Tensor:
    """Call the layer with this rank's tokens; return the choices of all ranks, shape (W, T, K)."""
    x_WTD = torch.randn(collectives.world_size(), TOKENS, DIM, generator=torch.Generator().manual_seed(number))
    layer(x_WTD[collectives.rank()])
    with torch.no_grad():
        return torch.stack([layer.router(x_TD).expert_ids_TK for x_TD in x_WTD])


def planner_load(stop: bool, ep_size: int, stride: int) -> tuple[Any, Any]:
    """Return the planner's load of the second window of two steps, and the expected load; `stop` resumes within it."""
    loads: list[Any] = []

    def listen(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:
        loads.append(load_E)
        return current

    options, chosen = ReplanOptions(planner=listen, every=2, guarded=False), []
    layer = make_layer(*SIZES, ep_size=ep_size, ep_stride=stride)
    replanner = Replanner(expert_stacks(layer), options)
    for number in range(4):
        chosen.append(forward(layer, number))
        replanner.after_step(number + 1, OPTIMIZER)
        if stop and number == 2:
            state = replanner.state_dict()
            layer = make_layer(*SIZES, ep_size=ep_size, ep_stride=stride)
            replanner = Replanner(expert_stacks(layer), options)
            replanner.load_state_dict(state)
    ids_PTK = torch.cat(chosen[2:], dim=1)
    groups = len(ids_PTK) // ep_size
    return loads[-1], ids_PTK.flatten().bincount(minlength=EXPERTS).numpy() / (2 * groups)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize(("world", "ep_size", "stride"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_replanner_gives_the_planner_the_mean_load_of_its_window(world: int, ep_size: int, stride: int, stop: bool):
    for load, expected in run_distributed(planner_load, world, stop, ep_size, stride):
        np.testing.assert_allclose(load, expected)


def sampled(ep_size: int, stride: int) -> tuple[Any, Any, int]:
    """Return the sampled choices of five tokens of each rank, all choices, and the bytes of a row."""
    layer = make_layer(*SIZES, ep_size=ep_size, ep_stride=stride)
    forward(layer, 0)
    chosen = forward(layer, 1)
    (sample,) = sample_forwards([layer.expert_stack.log], 5)
    return sample.choices_PTK, chosen.numpy(), sample.row_bytes


@pytest.mark.parametrize(("world", "ep_size", "stride"), [(1, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_sample_forwards_gives_the_last_choices_of_all_ranks(world: int, ep_size: int, stride: int) -> None:
    for sample, chosen, row_bytes in run_distributed(sampled, world, ep_size, stride):
        place = np.arange(world) // stride % ep_size
        wanted = np.stack([np.concatenate(chosen[place == rank, :5]) for rank in range(ep_size)])
        np.testing.assert_array_equal(sample, wanted)
        assert row_bytes == 2 * 4 * DIM + 2 * (4 + 2)  # with two weights, and half of two slots


def guard_rates(planner: str = "lpt") -> CostModel:
    """Return the rates of a guard whose clock advances by a second at each call."""
    layer = make_layer(*SIZES)
    replanner = Replanner(expert_stacks(layer), ReplanOptions(planner=planner, every=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.experts.parallel.waits.time.perf_counter", map(float, count()).__next__)
        for step in range(1, 5):
            forward(layer)
            replanner.after_step(step, torch.optim.SGD(layer.parameters()))
    (guard,) = replanner.guards.values()
    return guard.cost_model


def test_replanner_measures_seconds_per_row_and_link_bandwidth_for_a_guard_only() -> None:
    rates = guard_rates()
    assert rates.seconds_per_row == pytest.approx(3 / (TOKENS * 2))  # one clock call before the experts, one after
    assert rates.bytes_per_second == math.inf
    # One second for half of 4 MiB, if there is a plan.
    for planner, speed in (("lpt", 2**21), ("contiguous", math.inf)):
        for rates in run_distributed(guard_rates, 2, planner):
            assert rates.seconds_per_row == pytest.approx(3 / (TOKENS * 2))
            assert rates.bytes_per_second == speed
    layer = make_layer(*SIZES)
    replanner = Replanner(expert_stacks(layer), ReplanOptions(planner="lpt", every=100, guarded=False))
    forward(layer)
    replanner.after_step(1, OPTIMIZER)
    assert replanner._ends == []
    assert layer.expert_stack.timing is None


def test_rejected_plans_are_counted_and_the_first_is_explained(capsys: pytest.CaptureFixture[str]):
    layer, logged = make_layer(*SIZES), []
    # All experts are on one rank, so a plan saves nothing.
    replan = Replan(ReplanOptions(planner=lambda *_: by_slot((1, 0, 2, 3), 1), every=4))
    trainer: Any = SimpleNamespace(results={}, state=SimpleNamespace(step=0), experts=Experts.of(layer))
    replan.on_init(trainer)
    trainer.record = lambda name, value: logged.append(value) if name == "moe/plans_refused" else None
    for number in range(1, 17):
        forward(layer, number)
        trainer.state.step, trainer.at_log_step = number, number % 8 == 0
        replan.replanner.after_step(number, OPTIMIZER)
        replan.on_step_end(trainer)
    assert logged == [2, 2]
    assert trainer.results["plans_refused"] == 4
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 4: the guard rejects a plan for ")


def test_replanner_advises_a_spare_slot_once_for_the_layer_that_it_balances(capsys: pytest.CaptureFixture[str]):
    replanner = Replanner({}, ReplanOptions())
    windows = [Window(np.array([load]), np.array([4])) for load in ([3.0, 1.0, 1.0, 1.0], [6.0, 1.0, 1.0, 1.0])]
    for slots, printed in ((3, False), (2, True), (2, False)):
        stack: Any = SimpleNamespace(placement=contiguous(4, 2, slots_per_rank=slots))
        replanner.stacks = {"even": stack, "uneven": stack}
        replanner._advise_spare_slots(400, windows)
        advice = "would lower the imbalance of uneven from 1.56 to 1.33 (planner replicate: 1.00)."
        assert capsys.readouterr().out == f"step 400: one spare slot per rank (spare_slots=1) {advice}\n" * printed


def test_replanner_planner_by_default_and_by_import_path() -> None:
    stacks = expert_stacks(make_layer(*SIZES))
    assert Replanner(stacks, ReplanOptions()).planner is PLANNERS["swap"]
    options = ReplanOptions(planner="toolkit.experts.placement.planners.simple:lpt")
    assert Replanner(stacks, options).planner is PLANNERS["lpt"]
