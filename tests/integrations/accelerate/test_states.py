"""Saved and loaded states of a loop: learning rates, random states and all optimizers."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import Toy, ToyLoop, error_of, expert_adamw, non_expert_adamw, samples, sgd
from tests.parity.outcome import Rows, gathered, rows_by_id
from tests.support.equality import assert_equal_rows
from toolkit.errors import UserError
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def make_loop(placement: str = "contiguous") -> ToyLoop:
    """Return a loop with two optimizers, and a schedule whose first learning rate is 0."""
    return ToyLoop(expert_adamw, non_expert_adamw, placement=placement, schedule=lambda step: step / 10)


def weights_and_moments(loop: ToyLoop) -> Rows:
    states = {p: state for each in loop.optimizers for p, state in each.optimizer.state.items()}
    weights, _ = rows_by_id(loop.raw, lambda p: p.detach())
    moments, _ = rows_by_id(loop.raw, lambda p: states[p]["exp_avg"], ".exp_avg")
    return weights | moments


def save_and_load(folder: Path, by: str) -> tuple[Rows, Rows]:
    """Return weights and moments after four steps, and after four steps with a resume."""

    def rates_and_random_number() -> list[float]:
        return [group["lr"] for each in loop.optimizers for group in each.param_groups] + [float(torch.rand(()))]

    loop = make_loop()
    loop.train(range(2))
    if by == "experts":
        loop.experts.save(folder, scheduler=loop.schedulers[0].state_dict())
    else:
        loop.accelerator.save_state(str(folder))
    expected = rates_and_random_number()
    assert expected[0] > 0
    loop.train(range(2, 4))
    uninterrupted = weights_and_moments(loop)
    loop.accelerator.free_memory()
    loop = make_loop()
    assert loop.optimizers[0].param_groups[0]["lr"] == 0.0
    if by == "experts":
        loop.schedulers[0].load_state_dict(loop.experts.load(folder)["scheduler"])
    else:
        loop.accelerator.load_state(str(folder))
    assert rates_and_random_number() == expected
    loop.train(range(2, 4))
    return uninterrupted, weights_and_moments(loop)


@pytest.mark.parametrize("by", ["experts", "save_state"])
def test_resume_restores_rates_random_states_and_all_optimizers(by: str, tmp_path: Path) -> None:
    for uninterrupted, resumed in run_distributed(save_and_load, 2, tmp_path / "saved", by):
        assert_equal_rows(resumed, uninterrupted, 0.0)


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


class HubToy(Toy, PyTorchModelHubMixin):
    """A model that huggingface_hub saves."""


def save_and_load_by_hub(folder: Path) -> tuple[Tensor, Tensor]:
    """Return outputs of a trained model, and of the model that was saved and loaded."""
    loop = ToyLoop(model=HubToy(), placement="shuffled")
    x = torch.ones(4, 5, dtype=torch.float64)
    with loop.experts:
        loop.train([0])
        loop.raw.save_pretrained(folder)
        loop.accelerator.wait_for_everyone()
        with torch.no_grad():
            return loop.model(x), HubToy.from_pretrained(folder)(x)


@pytest.mark.parametrize("world", [1, 2])
def test_save_pretrained_of_hub_mixin_has_experts_of_all_ranks(world: int, tmp_path: Path) -> None:
    for expected, found in run_distributed(save_and_load_by_hub, world, tmp_path / "model"):
        torch.testing.assert_close(found, expected)
