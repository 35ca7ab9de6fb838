"""Several optimizers of one model, and errors of unsupported optimizers and of optimizer states of other experts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import Toy, ToyLoop, adamw, error_of, expert_adamw, non_expert_adamw, samples
from tests.parity.models import EXPERTS
from tests.parity.optimizers import DecayedSGD
from tests.parity.outcome import Rows, gathered
from tests.support.equality import assert_equal_rows
from tests.support.placements import by_slot
from toolkit.experts.moving.migrate import place_experts


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


def test_python_numbers_in_optimizer_states_are_restored(tmp_path: Path) -> None:
    loop, resumed = (ToyLoop(lambda model: DecayedSGD(model.parameters(), lr=0.1)) for _ in range(2))
    loop.train(range(2))
    loop.experts.save(tmp_path / "saved")
    resumed.experts.load(tmp_path / "saved")
    expected, found = ([*each.optimizers[0].state.values()] for each in (loop, resumed))
    assert found == expected
    assert {(type(state["step"]), type(state["rate"])) for state in found} == {(int, float)}


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
    return errors + [error_of(optimizer.load_state_dict, state) for state in (own, optimizer.state_dict())]


def test_load_state_dict_of_other_experts_raises() -> None:
    first, second = run_distributed(load_state_dict_errors, 2)
    message = first[2]
    assert message.startswith("optimizer: this state is of other experts")
    assert first == ["", "", message, message, ""]
    assert second == [message, "", message, message, ""]
