"""Checkpoint traps: `load_state` gives every rank the experts of rank 0.

Tests of the toolkit's own checkpoints: `tests/test_elastic.py`, `tests/test_resume.py` and `tests/checkpoint`.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
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
