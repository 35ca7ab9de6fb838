"""What a loop saves and loads beside weights: learning rates, random states, all optimizers; and what keeps a model in
memory."""

from __future__ import annotations

import contextlib
import gc
import io
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.test_expert_parallel import Model, by_id, place, together
from toolkit.errors import UserError
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def prepared(kind: str = "blocks") -> tuple[Accelerator, ExpertParallel, Any, list[Any], Any]:
    """A model whose experts and rest have optimizers of their own, and a schedule that begins at a rate of 0."""
    accelerator, model = Accelerator(cpu=True), Model().double()
    rows = [p for block in model.blocks for p in block.experts.parameters()]
    rest = [p for p in model.parameters() if all(p is not row for row in rows)]
    optimizers = [torch.optim.AdamW(rows, lr=0.02), torch.optim.AdamW(rest, lr=0.05)]
    scheduler = LambdaLR(optimizers[0], lambda step: step / 10)
    experts = ExpertParallel(accelerator, placement=place(kind))
    wrapped, *optimizers, scheduler = experts.prepare(model, *optimizers, scheduler)
    return accelerator, experts, wrapped, optimizers, scheduler


def train(accelerator: Accelerator, model: Any, optimizers: list[Any], scheduler: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward(model(mine).square().sum() * accelerator.num_processes)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


def state(model: Any, optimizers: list[Any]) -> dict[str, Tensor]:
    raw = getattr(model, "module", model)
    moments: Any = {p: s for optimizer in optimizers for p, s in optimizer.optimizer.state.items()}
    found = by_id(raw, lambda p: p.detach())
    return found | {f"{k} of moment": v for k, v in by_id(raw, lambda p: moments[p]["exp_avg"]).items()}


def saved_and_loaded(folder: Path, by: str) -> tuple[Any, Any, list[float]]:
    """Weights and moments after four steps, whole and in two parts; and rates and a random number after the load."""
    accelerator, experts, model, optimizers, scheduler = prepared()
    train(accelerator, model, optimizers, scheduler, range(2))
    if by == "experts":
        experts.save(folder, scheduler=scheduler.state_dict())
    else:
        accelerator.save_state(str(folder))
    numbers = [group["lr"] for each in optimizers for group in each.param_groups] + [float(torch.rand(()))]
    train(accelerator, model, optimizers, scheduler, range(2, 4))
    whole = state(model, optimizers)
    accelerator.free_memory()
    accelerator, experts, model, optimizers, scheduler = prepared()
    assert optimizers[0].param_groups[0]["lr"] == 0.0
    if by == "experts":
        scheduler.load_state_dict(experts.load(folder)["scheduler"])
    else:
        accelerator.load_state(str(folder))
    again = [group["lr"] for each in optimizers for group in each.param_groups] + [float(torch.rand(()))]
    assert again == numbers, (again, numbers)
    train(accelerator, model, optimizers, scheduler, range(2, 4))
    return whole, state(model, optimizers), numbers


@pytest.mark.parametrize("by", ["experts", "save_state"])
def test_a_loop_goes_on_with_its_rates_random_states_and_all_optimizers(by: str, tmp_path: Path):
    for whole, parts, numbers in run_distributed(saved_and_loaded, 2, tmp_path / "saved", by):
        assert numbers[0] > 0
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


def load_and_collect_warnings(folder: Path) -> list[str]:
    accelerator, experts, _, _, scheduler = prepared()
    if dist.get_world_size() == 2:
        experts.save(folder, scheduler=scheduler.state_dict())
    torch.manual_seed(7)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(7))
    with warnings.catch_warnings(record=True) as caught:
        experts.load(folder)
    assert torch.equal(torch.rand(2), expected) == (dist.get_world_size() == 1), (
        "restored with the same world size only"
    )
    accelerator.free_memory()
    return [str(warning.message) for warning in caught if "scheduler" in str(warning.message)]


def test_load_prepared_scheduler_other_world_size_warns(tmp_path: Path):
    assert run_distributed(load_and_collect_warnings, 2, tmp_path / "saved") == [[], []]
    (found,) = run_distributed(load_and_collect_warnings, 1, tmp_path / "saved")
    assert "1 times per step instead of 2" in found[0]


def save_state(folder: Path) -> dict[str, Tensor]:
    accelerator, _, model, optimizers, scheduler = prepared("copies")
    train(accelerator, model, optimizers, scheduler, range(3))
    accelerator.save_state(str(folder))
    return state(model, optimizers)


def load_state(folder: Path) -> dict[str, Tensor]:
    accelerator, _, model, optimizers, _ = prepared("shuffled")
    accelerator.load_state(str(folder))
    return state(model, optimizers)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (1, 2)])
def test_any_number_of_processes_loads_the_state_that_others_saved(before: int, after: int, tmp_path: Path):
    saved, loaded = run_distributed(save_state, before, tmp_path), run_distributed(load_state, after, tmp_path)

    def owned(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return together([{k: v for k, v in rank.items() if " copy" not in k} for rank in ranks])

    expected, found = owned(saved), owned(loaded)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_an_optimizer_with_a_parameter_outside_the_model_is_refused_before_anything_is_changed():
    model, temperature = Model(), nn.Parameter(torch.ones(()))
    before = dict(vars(model.blocks[0].experts))
    with pytest.raises(UserError, match=r"parameter of shape \(\) in group 0 that is not in the model"):
        ExpertParallel(Accelerator(cpu=True)).prepare(model, torch.optim.SGD([*model.parameters(), temperature]))
    assert vars(model.blocks[0].experts).keys() == before.keys()


def forgotten_without_close() -> bool:
    """Whether a model that was prepared is still in memory once its accelerator alone is known."""
    accelerator, _, model, optimizers, scheduler = prepared()
    train(accelerator, model, optimizers, scheduler, range(2))
    known = weakref.ref(accelerator.unwrap_model(model))
    accelerator.free_memory()
    del _, model, optimizers, scheduler
    gc.collect()
    still_clips = accelerator.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
    return known() is None and bool(still_clips)


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_is_forgotten_without_close_though_its_accelerator_stays(world: int):
    assert run_distributed(forgotten_without_close, world) == [True] * world


def evaluated_without_an_optimizer(folder: Path) -> tuple[bool, str, str]:
    """Whether a model that was trained and one that is only evaluated say the same; and what a backward pass and a step
    of it say."""
    accelerator, experts, model, optimizers, scheduler = prepared()
    train(accelerator, model, optimizers, scheduler, range(2))
    experts.save(folder)
    x = torch.ones(3, 5, dtype=torch.float64)
    expected = model(x)
    only = Model().double()
    evaluation = ExpertParallel(accelerator)
    wrapped = evaluation.prepare(only)
    evaluation.load(folder)
    with evaluation.join():
        same = torch.equal(wrapped(x), expected)
    with pytest.raises(UserError) as of_backward:
        wrapped(x).sum().backward()
    with pytest.raises(UserError) as of_step:
        torch.optim.SGD(only.parameters()).step()
    return same, str(of_backward.value), str(of_step.value)


def test_a_model_is_evaluated_without_an_optimizer(tmp_path: Path):
    for same, of_backward, of_step in run_distributed(evaluated_without_an_optimizer, 2, tmp_path / "saved"):
        assert same
        assert of_backward.startswith("prepare: it got no optimizer")
        assert "has experts that were prepared with another optimizer, with none" in of_step


def test_prepare_says_which_layers_were_spread(capfd: pytest.CaptureFixture[str]):
    ExpertParallel(Accelerator(cpu=True)).prepare(Model())
    assert "experts whole on each rank: blocks.0.experts, blocks.1.experts." in capfd.readouterr().out


def said_of_batch_norm() -> list[bool]:
    """Whether a line says that processes have their own, of a model with batch norm and of one without."""
    found = []
    for normed in (True, False):
        model = Model()
        if normed:
            model.head = nn.Sequential(nn.BatchNorm1d(model.head.in_features), model.head)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            ExpertParallel(Accelerator(cpu=True)).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found.append("batch norm is over each process's part of the batch, unlike in one process" in said.getvalue())
    return found


@pytest.mark.parametrize(("world", "expected"), [(1, [[False, False]]), (2, [[True, False], [False, False]])])
def test_prepare_says_that_processes_have_their_own_batch_norm(world: int, expected: list[list[bool]]):
    assert run_distributed(said_of_batch_norm, world) == expected


class OnHub(Model, PyTorchModelHubMixin):
    """A model that another library than transformers saves."""


def saved_by_the_hub(folder: Path) -> tuple[Tensor, Tensor]:
    """Return outputs of a trained model, and of the model that was saved and loaded."""
    model, accelerator = OnHub(), Accelerator(cpu=True)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    with ExpertParallel(accelerator, placement=place("shuffled")) as experts:
        prepared, optimizer = experts.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(prepared(x).square().sum())
        optimizer.step()
        model.save_pretrained(folder)
        accelerator.wait_for_everyone()
        with torch.no_grad():
            return prepared(x), OnHub.from_pretrained(folder)(x)


@pytest.mark.parametrize("world", [1, 2])
def test_save_pretrained_of_a_hub_mixin_has_the_experts_of_all_ranks(world: int, tmp_path: Path):
    for output, again in run_distributed(saved_by_the_hub, world, tmp_path / "model"):
        torch.testing.assert_close(again, output)
