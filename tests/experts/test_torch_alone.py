"""Experts in a loop on torch alone: `from toolkit import experts` is enough, light, and learns what one process
does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.precision import in_float64
from benchmarks.support.processes import ROOT, free_port, program_environment, run_distributed
from tests.support.forked_python import ForkedPython
from toolkit import experts
from toolkit.experts.state.state_dict import whole_state_dict

EXAMPLE = ROOT / "docs" / "examples" / "torch_alone.py"
PAGE = ROOT / "docs" / "experts" / "torch_alone.md"


def test_it_loads_torch_and_no_other_large_library():
    code = (
        "import sys; from toolkit import experts; "
        "[getattr(experts, n) for n in experts.__all__];"
        "print(*{'torch', 'transformers', 'accelerate', 'datasets', 'wandb', 'peft'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=program_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["torch"]


def train(folder: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Eight clipped AdamW steps with a real rate, in which experts move; saves after four, and trains the rest
    twice."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with in_float64():
        torch.manual_seed(0)
        mixture = experts.make_moe(dim=8, hidden_dim=16, num_experts=8, top_k=2)
        model = nn.Sequential(nn.Linear(8, 8), mixture, nn.Linear(8, 1))
        groups = experts.make_expert_groups(min(2, world))
        stacks = experts.shard_experts(model, groups)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        called = DistributedDataParallel(model) if world > 1 else model
        replanner = experts.Replanner(stacks, experts.ReplanOptions(planner="swap", every=2, guarded=False))
        sync = experts.ExpertSync(model.parameters(), rebalance=replanner.after_step)
        norms = []

        def steps(first: int, last: int) -> None:
            for step in range(first, last):
                x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
                optimizer.zero_grad()
                mse_loss(called(x), x.sum(-1, keepdim=True).sin()).backward()
                sync.before_clip()
                norms.append(sync.clip(model.parameters(), 0.5).item())
                optimizer.step()
                sync.after_step(step, optimizer)

        steps(1, 5)
        experts.save(folder, model, optimizer)
        steps(5, 9)
        experts.load(folder, model, optimizer)
        steps(5, 9)
    return norms, whole_state_dict(model), len(replanner.migrations)


def test_two_and_four_processes_learn_what_one_does_while_experts_move(tmp_path: Path):
    norms, weights, _ = train(str(tmp_path / "one"))
    for world in (2, 4):
        for rank, (found, whole, moves) in enumerate(run_distributed(train, world, str(tmp_path / f"of-{world}"))):
            torch.testing.assert_close(found, norms, rtol=1e-9, atol=0)
            assert moves > 0
            for name, weight in whole.items() if rank == 0 else ():
                torch.testing.assert_close(weight, weights[name], rtol=1e-9, atol=1e-12)


def run_example(script: Path, folder: Path) -> list[tuple[str, str]]:
    """The last loss of each rank, and what it is again after loading."""
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environments = [program_environment(**launched, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    ranks = [ForkedPython(str(script), str(folder), env=environment) for environment in environments]
    try:
        (first, first_error), (second, second_error) = [rank.communicate(timeout=300) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], first_error + second_error
    finally:
        for rank in ranks:
            rank.kill()
    return re.findall(r"loss ([\d.]+), again ([\d.]+)", first + second)


def test_the_example_saves_and_loads_on_two_processes(tmp_path: Path):
    losses = run_example(EXAMPLE, tmp_path)
    assert len(losses) == 2
    assert all(after == again for after, again in losses)


def test_under_fabric_it_learns_the_same(tmp_path: Path):
    pytest.importorskip("lightning.fabric")
    text = EXAMPLE.read_text()
    (diff,) = re.findall(r"```diff\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    for hunk in diff.split("\n\n"):
        before, after = ("\n".join(re.findall(f"^[{sign}](.*)", hunk, re.MULTILINE)) for sign in ("-", "+"))
        assert text.count(before) == 1
        text = text.replace(before, after)
    script = tmp_path / "script.py"
    script.write_text(text)
    losses = run_example(script, tmp_path / "fabric")
    assert len(losses) == 2
    assert sorted(losses) == sorted(run_example(EXAMPLE, tmp_path / "torch"))
