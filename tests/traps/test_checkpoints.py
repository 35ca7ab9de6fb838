"""Checkpoint traps: `save_state`, `load_state` and `save_model` lose experts, collide, or load damaged files.

Tests of the toolkit's own checkpoints: `tests/test_elastic.py`, `tests/test_resume.py` and `tests/checkpoint`.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.processes import run_distributed
from tests.traps.toys import ToyMoE, expert_groups, local_loss
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import is_owned


def expert_tensors(model: ToyMoE, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return weights and first moments of this rank's experts."""
    parameters = list(model.moe.experts.parameters())
    return [p.detach().clone() for p in parameters] + [optimizer.state[p]["exp_avg"].clone() for p in parameters]


def save_and_load_state(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of this rank's experts before and after `save_state` and `load_state`."""
    model = ToyMoE(expert_groups())
    with pytest.raises(UserError, match="whole_state_dict"):
        model.state_dict()
    model.moe._state_dict_pre_hooks.clear()  # as a layer without the toolkit
    names = [name for name, p in model.named_parameters() if is_owned(p)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    accelerator = Accelerator()
    raw = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, raw)
    accelerator.backward(local_loss(prepared))
    optimizer.step()
    before = expert_tensors(model, raw)
    accelerator.save_state(str(folder))
    dist.barrier()
    accelerator.load_state(str(folder))
    return before, expert_tensors(model, raw)


def test_load_state_gives_every_rank_the_experts_of_rank_0(tmp_path: Path):
    (before_0, after_0), (before_1, after_1) = run_distributed(save_and_load_state, 2, tmp_path)
    assert all(map(torch.equal, after_0, before_0))
    assert all(map(torch.equal, after_1, before_0)), "an error is expected"
    assert not any(map(torch.equal, after_1, before_1))
    model, accelerator = ToyMoE(ExpertGroups()), Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for .*experts\.up"):
        accelerator.load_state(str(tmp_path))


def save_model(folder: Path) -> tuple[Tensor, Tensor]:
    """Save a model with a different expert on each rank, and return the expert here and in `get_state_dict`."""
    torch.manual_seed(1 + dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    accelerator.save_model(prepared, folder)
    return model[1].weight.detach(), accelerator.get_state_dict(prepared)["1.weight"]


def test_save_model_has_the_experts_of_rank_0_only(tmp_path: Path):
    (first, in_state_0), (second, in_state_1) = run_distributed(save_model, 2, tmp_path)
    assert not torch.equal(first, second)
    assert torch.equal(in_state_0, first)
    assert torch.equal(in_state_1, second), "get_state_dict has the expert of the calling rank"
    assert torch.equal(load_file(tmp_path / "model.safetensors")["1.weight"], first)


def accelerator_and_model(folder: Path, total_limit: int | None, weight: float) -> tuple[Accelerator, Any]:
    names = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=total_limit)
    accelerator = Accelerator(cpu=True, project_config=names)
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, weight)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model


def kill_during_second_save(folder: Path) -> None:
    accelerator, _ = accelerator_and_model(folder, total_limit=1, weight=1.0)
    accelerator.save_state()
    with pytest.MonkeyPatch.context() as monkeypatch:
        # torch.save writes the optimizer, after the weights.
        monkeypatch.setattr("torch.save", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        accelerator.save_state()


def test_kill_during_save_state_leaves_no_checkpoint_that_loads(tmp_path: Path):
    with pytest.raises(AssertionError, match="rank 0 of 1 exited"):
        run_distributed(kill_during_second_save, 1, tmp_path)
    accelerator, _ = accelerator_and_model(tmp_path, total_limit=1, weight=0.0)
    with pytest.raises(FileNotFoundError, match="optimizer"):
        accelerator.load_state()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1, (
        "the first checkpoint was deleted before the second save"
    )


def save_after_resume(folder: Path, total_limit: int | None) -> tuple[str, float]:
    """Save weights 1 and 2, resume, and save weight 3. Return the error, and the weight that is loaded next."""
    accelerator, model = accelerator_and_model(folder, total_limit, weight=1.0)
    accelerator.save_state()
    nn.init.constant_(model.weight, 2.0)
    accelerator.save_state()

    accelerator, model = accelerator_and_model(folder, total_limit, weight=0.0)
    accelerator.load_state()
    assert model.weight.item() == 2.0
    nn.init.constant_(model.weight, 3.0)
    error = ""
    try:
        accelerator.save_state()
    except ValueError as raised:
        error = str(raised)
    accelerator.load_state()
    return error, model.weight.item()


def test_save_state_after_a_resume_raises_or_is_not_the_newest(tmp_path: Path):
    error, _ = save_after_resume(tmp_path / "unlimited", None)
    assert "already exists" in error
    # The third save takes the name of the first, so that the second counts as newest.
    assert save_after_resume(tmp_path / "limited", 2) == ("", 2.0)


def test_load_state_loads_a_flipped_bit(tmp_path: Path):
    accelerator, model = accelerator_and_model(tmp_path, None, weight=1.0)
    nn.init.constant_(model.bias, 1.0)
    accelerator.save_state()
    file = tmp_path / "checkpoints" / "checkpoint_0" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0b0100_0000
    file.write_bytes(content)
    accelerator.load_state()
    assert model.weight.item() * model.bias.item() != 1.0
