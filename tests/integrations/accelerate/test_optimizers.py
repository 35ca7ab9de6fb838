"""Optimizers whose state exists before the first step, holds Python numbers, spans experts, or is of other rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.support.processes import run_distributed
from tests.experts.parallel.test_optimizer_rows import transformers_adafactor
from tests.integrations.accelerate.test_expert_parallel import (
    BATCH,
    EXPERTS,
    MIGRATING,
    Model,
    by_id,
    place,
    shares,
    together,
)
from tests.integrations.accelerate.test_loops import refused
from tests.support.equality import assert_equal_rows
from tests.support.optimizers import ScheduleFreeSGD
from tests.support.placements import by_slot
from toolkit.errors import UserError
from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.muon import Muon, muon_groups
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(muon_groups(model), lr=0.05)


def stopped_and_continued(
    folder: Path, make: Any, steps: tuple[int, int], dense: Literal["ddp", "fsdp2"] = "ddp"
) -> dict[str, Tensor]:
    """Weights after some steps, a checkpoint that another placement loads, and some more."""
    draws = torch.Generator().manual_seed(1)
    for part, kind in zip(steps, ("copies", "shuffled"), strict=True):
        model, accelerator = Model().double(), Accelerator(cpu=True)
        experts = ExpertParallel(accelerator, placement=place(kind), spare_slots=1, dense=dense, **MIGRATING)
        prepared, optimizer = experts.prepare(model, make(model))
        if kind == "shuffled":
            experts.load(folder)
        for _ in range(part):
            x = torch.randn(BATCH, 5, dtype=torch.float64, generator=draws)
            loss = prepared(x[shares(1)[0]]).square().sum() * accelerator.num_processes / BATCH
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        experts.save(folder)
    return by_id(model, lambda p: p.full_tensor() if isinstance(p, DTensor) else p.detach())


def test_state_before_the_first_step_follows_the_experts(tmp_path: Path) -> None:
    (expected,) = run_distributed(stopped_and_continued, 1, tmp_path / "1", adagrad, (3, 3))
    found = run_distributed(stopped_and_continued, 2, tmp_path / "2", adagrad, (3, 3))
    assert_equal_rows(together(found), expected, 1e-10)


@pytest.mark.parametrize(("world", "dense"), [(2, "ddp"), (4, "ddp"), (2, "fsdp2")])
def test_muon_with_moves_replicas_and_resume_equals_one_process(world: int, dense: str, tmp_path: Path) -> None:
    (expected,) = run_distributed(stopped_and_continued, 1, tmp_path / "1", muon, (3, 3))
    found = run_distributed(stopped_and_continued, world, tmp_path / "2", muon, (3, 3), dense)
    assert_equal_rows(together(found), expected, 1e-10)


def evaluated_schedule_free(kind: str) -> dict[str, Tensor]:
    model, accelerator = Model().double(), Accelerator(cpu=True)
    experts = ExpertParallel(accelerator, placement=place(kind), spare_slots=1)
    prepared, optimizer = experts.prepare(model, ScheduleFreeSGD(model.parameters(), lr=0.1))
    draws = torch.Generator().manual_seed(1)
    for _ in range(4):
        optimizer.train()
        x = torch.randn(BATCH, 5, dtype=torch.float64, generator=draws)
        loss = prepared(x[shares(1)[0]]).square().sum() * accelerator.num_processes / BATCH
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
    return by_id(model, lambda p: p.detach())


def test_schedule_free_optimizer_evaluates_replicas_as_one_process() -> None:
    (expected,) = run_distributed(evaluated_schedule_free, 1, "blocks")
    for world in (2, 4):
        found = run_distributed(evaluated_schedule_free, world, "copies")
        assert_equal_rows(together(found), expected, 1e-10)


class DecayedSGD(torch.optim.SGD):
    """Counts in Python numbers, as many optimizers do that are not torch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            assert isinstance(state.setdefault("step", 0), int)
            assert isinstance(state.setdefault("rate", 0.1), float)
            state["step"] += 1
            state["rate"] *= 0.7
            p.sub_(p.grad, alpha=state["rate"] / state["step"])


def decayed_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return DecayedSGD(model.parameters())


def test_python_numbers_in_states_are_saved(tmp_path: Path) -> None:
    (expected,) = run_distributed(stopped_and_continued, 1, tmp_path / "whole", decayed_sgd, (4, 0))
    found = run_distributed(stopped_and_continued, 2, tmp_path / "parts", decayed_sgd, (2, 2))
    assert_equal_rows(together(found), expected, 1e-10)


def refusals() -> list[str]:
    said = []
    for make, dense in ((lambda model: transformers_adafactor(model.parameters()), "ddp"), (adagrad, "fsdp2")):
        model = Model()
        with pytest.raises(UserError) as error:
            ExpertParallel(Accelerator(cpu=True), dense=dense).prepare(model, make(model))  # type: ignore[arg-type]
        said.append(str(error.value))
    return said


def test_unsupported_optimizer_raises() -> None:
    first, second = run_distributed(refusals, 2)
    assert first == second
    assert first[0].startswith("optimizer: Adafactor uses statistics of several experts")
    assert first[1].startswith("optimizer: Adagrad has state before its first step")


def trained_with_two_optimizers(dense: Any) -> dict[str, Tensor]:
    """Weights after steps of an optimizer that has the experts and one that has the rest."""
    accelerator, model = Accelerator(cpu=True), Model().double()
    rows = [p for block in model.blocks for p in block.experts.parameters()]
    of_rows = torch.optim.AdamW(rows, lr=0.02)
    of_rest = torch.optim.AdamW([p for p in model.parameters() if all(p is not row for row in rows)], lr=0.05)
    prepared, *optimizers = ExpertParallel(accelerator, dense=dense).prepare(model, of_rows, of_rest)
    draws = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(BATCH, 5, dtype=torch.float64, generator=draws)
        accelerator.backward(prepared(x[shares(1)[0]]).square().sum() * accelerator.num_processes)
        accelerator.clip_grad_norm_(prepared.parameters(), 0.3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return by_id(model, lambda p: p.detach())


@pytest.mark.parametrize("dense", ["ddp", "fsdp2"])
def test_two_optimizers_equal_one_process(dense: str):
    (expected,) = run_distributed(trained_with_two_optimizers, 1, dense)
    assert_equal_rows(together(run_distributed(trained_with_two_optimizers, 2, dense)), expected, 1e-10)


def one_of_two_optimizers() -> str:
    model = Model()
    rows = [p for block in model.blocks for p in block.experts.parameters()]
    return refused(lambda: ExpertParallel(Accelerator(cpu=True), dense="fsdp2").prepare(model, torch.optim.SGD(rows)))


def test_fsdp2_parameter_in_no_optimizer_raises():
    first, second = run_distributed(one_of_two_optimizers, 2)
    assert first == second
    assert first.startswith("prepare: 'stem.weight' is in no optimizer that was given")


def states_loaded() -> list[str]:
    """What is said of rank 0's state, of this rank's own, of one that was made without experts on several ranks, and of
    this rank's own once experts have moved: from before, and from now."""
    model = Model()
    experts = ExpertParallel(Accelerator(cpu=True))
    prepared, optimizer = experts.prepare(model, torch.optim.AdamW(model.parameters()))
    prepared(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    own = torch.load(file)
    first = [own]
    dist.broadcast_object_list(first)
    plain = {key: own[key] for key in ("state", "param_groups")}
    said = [refused(lambda state=state: optimizer.load_state_dict(state)) for state in (first[0], own, plain)]
    place_experts(model, by_slot([*range(1, EXPERTS), 0], 2), optimizer)
    return said + [
        refused(lambda state=state: optimizer.load_state_dict(state)) for state in (own, optimizer.state_dict())
    ]


def test_load_state_dict_of_other_experts_raises():
    first, second = run_distributed(states_loaded, 2)
    sentence = first[2]
    assert sentence.startswith("optimizer: this state is of other experts")
    assert first == ["", "", sentence, sentence, ""]
    assert second == [sentence, "", sentence, sentence, ""]
