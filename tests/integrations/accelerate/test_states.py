"""Several optimizers of one model, and saved and loaded states of a loop."""

from __future__ import annotations

import io
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import (
    Toy,
    ToyLoop,
    adamw,
    error_of,
    expert_adamw,
    non_expert_adamw,
    samples,
    sgd,
)
from tests.parity.models import EXPERTS
from tests.parity.outcome import Rows, gathered, rows_by_id
from tests.support.equality import assert_equal_rows
from tests.support.placements import by_slot
from toolkit.errors import UserError
from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def make_loop(placement: str = "contiguous", **options: Any) -> ToyLoop:
    """Return a loop with two optimizers, and a schedule whose first learning rate is 0."""
    return ToyLoop(expert_adamw, non_expert_adamw, placement=placement, schedule=lambda step: step / 10, **options)


def weights_and_moments(loop: ToyLoop) -> Rows:
    states = {p: state for each in loop.optimizers for p, state in each.optimizer.state.items()}
    weights, _ = rows_by_id(loop.raw, lambda p: p.detach())
    moments, _ = rows_by_id(loop.raw, lambda p: states[p]["exp_avg"], ".exp_avg")
    return weights | moments


def save_and_load(folder: Path, by: str) -> tuple[Any, ...]:
    """Return placements at the start, and placements, weights and moments after eight steps without and with a resume.

    Experts migrate after steps 3 and 6; the resume is between.
    """
    migrating = {"spare_slots": 1, "replan": ReplanOptions(planner="replicate", every=3, guarded=False)}

    def rates_and_random_number() -> list[float]:
        return [group["lr"] for each in loop.optimizers for group in each.param_groups] + [float(torch.rand(()))]

    def placements() -> dict[str, Any]:
        return {name: stack.placement for name, stack in loop.experts.stacks.items()}

    loop = make_loop(**migrating)
    start = placements()
    loop.train(range(5))
    if by == "experts":
        loop.experts.save(folder, scheduler=loop.schedulers[0].state_dict())
    else:
        loop.accelerator.save_state(str(folder))
    expected = rates_and_random_number()
    assert expected[0] > 0
    loop.train(range(5, 8))
    uninterrupted = placements(), weights_and_moments(loop)
    loop.accelerator.free_memory()
    loop = make_loop(**migrating)
    assert loop.optimizers[0].param_groups[0]["lr"] == 0.0
    if by == "experts":
        loop.schedulers[0].load_state_dict(loop.experts.load(folder)["scheduler"])
    else:
        loop.accelerator.load_state(str(folder))
    assert rates_and_random_number() == expected
    loop.train(range(5, 8))
    return start, uninterrupted, (placements(), weights_and_moments(loop))


@pytest.mark.parametrize("by", ["experts", "save_state"])
def test_resume_restores_placements_rates_random_states_and_all_optimizers(by: str, tmp_path: Path) -> None:
    for start, uninterrupted, resumed in run_distributed(save_and_load, 2, tmp_path / "saved", by):
        assert resumed[0] == uninterrupted[0] != start
        assert_equal_rows(resumed[1], uninterrupted[1], 0.0)


def load_and_collect_warnings(folder: Path) -> list[str]:
    loop = make_loop()
    if dist.get_world_size() == 2:
        loop.experts.save(folder, scheduler=loop.schedulers[0].state_dict())
    torch.manual_seed(7)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(7))
    with warnings.catch_warnings(record=True) as caught:
        loop.experts.load(folder)
    is_restored = not torch.equal(torch.rand(2), expected)
    assert is_restored == (dist.get_world_size() == 2), "random states need the same world size"
    loop.accelerator.free_memory()
    return [str(warning.message) for warning in caught if "scheduler" in str(warning.message)]


def test_load_prepared_scheduler_other_world_size_warns(tmp_path: Path) -> None:
    assert run_distributed(load_and_collect_warnings, 2, tmp_path / "saved") == [[], []]
    (found,) = run_distributed(load_and_collect_warnings, 1, tmp_path / "saved")
    assert "1 times per step instead of 2" in found[0]


def save_or_load_state(folder: Path, *, saves: bool) -> Rows:
    loop = make_loop("replicas" if saves else "shuffled")
    if saves:
        loop.train(range(3))
        loop.accelerator.save_state(str(folder))
    else:
        loop.accelerator.load_state(str(folder))
    return weights_and_moments(loop)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (1, 2)])
def test_load_state_with_other_world_size_restores_all_experts(before: int, after: int, tmp_path: Path) -> None:
    saved = run_distributed(partial(save_or_load_state, saves=True), before, tmp_path)
    loaded = run_distributed(partial(save_or_load_state, saves=False), after, tmp_path)
    assert_equal_rows(gathered(loaded), gathered(saved), 0.0)


def evaluate_without_optimizer(folder: Path) -> tuple[bool, str, str]:
    """Return whether a loaded model equals a trained one, and the errors of its backward pass and of a step."""
    loop = make_loop()
    loop.train(range(2))
    loop.experts.save(folder)
    x, model = samples(), Toy()
    expected = loop.model(x)
    evaluation = ExpertParallel(loop.accelerator)
    prepared = evaluation.prepare(model)
    evaluation.load(folder)
    with evaluation.join():
        is_equal = torch.equal(prepared(x), expected)
    with pytest.raises(UserError) as error:
        prepared(x).sum().backward()
    return is_equal, str(error.value), error_of(sgd(model).step)


def test_model_without_optimizer_is_evaluated_only(tmp_path: Path) -> None:
    for is_equal, backward_error, step_error in run_distributed(evaluate_without_optimizer, 2, tmp_path / "saved"):
        assert is_equal
        assert backward_error.startswith("optimizer: none was given")
        assert "has experts that were prepared with another optimizer, with none" in step_error


def train_with_two_optimizers(dense: str) -> Rows:
    model = Toy()
    with torch.no_grad():  # all tokens choose experts of rank 0
        for block in model.blocks:
            block.norm.bias += 1
            block.moe.gate.weight[:2] += 0.5
    loop = ToyLoop(expert_adamw, non_expert_adamw, model=model, dense=dense)
    loop.train(range(3), max_norm=0.3)
    return loop.weights()


@pytest.mark.parametrize("dense", ["ddp", "fsdp2"])
def test_two_optimizers_equal_one_process(dense: str) -> None:
    (expected,) = run_distributed(train_with_two_optimizers, 1, dense)
    assert_equal_rows(gathered(run_distributed(train_with_two_optimizers, 2, dense)), expected, 1e-10)


def optimizer_errors() -> list[str]:
    return [
        error_of(ToyLoop, lambda model: torch.optim.Adagrad(model.parameters()), dense="fsdp2"),
        error_of(ToyLoop, expert_adamw, dense="fsdp2"),
    ]


def test_unsupported_optimizer_raises() -> None:
    first, second = run_distributed(optimizer_errors, 2)
    assert first == second
    adagrad, missing = first
    assert adagrad.startswith("optimizer: Adagrad has state before its first step")
    assert missing.startswith("prepare: 'stem.weight' is in no optimizer that was given")


def load_state_dict_errors() -> list[str]:
    """Return the errors for the state of rank 0, of this rank, and of unsharded experts, and after a migration for
    states from before and after it."""
    loop = ToyLoop(adamw)
    optimizer = loop.optimizers[0]
    loop.backward(samples())
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    own = torch.load(file)
    first = [own]
    dist.broadcast_object_list(first)
    unsharded = {key: own[key] for key in ("state", "param_groups")}
    errors = [error_of(optimizer.load_state_dict, state) for state in (first[0], own, unsharded)]
    place_experts(loop.raw, by_slot([*range(1, EXPERTS), 0], 2), optimizer)
    errors += [error_of(optimizer.load_state_dict, state) for state in (own, optimizer.state_dict())]
    return [*errors, error_of(loop.raw.state_dict)]


def test_load_state_dict_of_other_experts_raises() -> None:
    (*first, of_model), (*second, _) = run_distributed(load_state_dict_errors, 2)
    message = first[2]
    assert of_model.startswith("model.state_dict(): it would have the experts of this rank only")
    assert message.startswith("optimizer: this state is of other experts")
    assert first == ["", "", message, message, ""]
    assert second == [message, "", message, message, ""]
