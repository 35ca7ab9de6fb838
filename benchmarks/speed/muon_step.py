"""Optimizer steps of Muon, `torch.optim.Muon` and fused AdamW on a CPU.

    python benchmarks/speed/muon_step.py                 one thread, a minute

The matrices are from the language model of `recipes/lm_moe.py`, presets full and larger, MoE and dense: attention
and experts, in float32 with random gradients. `torch.optim.Muon` takes matrices only and gets each expert as a
parameter of its own; it orthogonalizes in bfloat16 on every device. All optimizers step the same parameters with the
same learning rate. Steps are timed by CPU time in interleaved rounds of one process; values are medians over rounds.
Writes benchmarks/results/muon_step.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.report import write_report
from recipes.lm_moe import build_model, dense, full, larger
from toolkit.experts.muon import Muon, muon_groups
from toolkit.run.process_settings import process_settings

MODELS = {
    "full": full,
    "full, dense": dense,
    "larger": larger,
    "larger, dense": lambda: dense(larger()),
}
VOCAB = 256
OURS, TORCH, ADAMW = "ours", "torch.optim.Muon", "AdamW, fused"


def stacks_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices and stacks of matrices that `muon_groups` orthogonalizes."""
    return [parameter for group in muon_groups(model) if group["orthogonalize"] for parameter in group["params"]]


def copies(stacks: list[nn.Parameter], *, apart: bool) -> list[nn.Parameter]:
    """Return copies with the same gradients; `apart` makes each matrix of a stack a parameter."""
    found = []
    for stack in stacks:
        assert stack.grad is not None
        values = zip(stack, stack.grad, strict=True) if apart and stack.ndim == 3 else [(stack, stack.grad)]
        for value, grad in values:
            parameter = nn.Parameter(value.detach().clone())
            parameter.grad = grad.clone()
            found.append(parameter)
    return found


def optimizers(stacks: list[nn.Parameter]) -> dict[str, Optimizer]:
    lr = 1e-3
    return {
        ADAMW: torch.optim.AdamW(copies(stacks, apart=False), lr=lr, weight_decay=0.1, fused=True),
        OURS: Muon([{"params": copies(stacks, apart=False), "orthogonalize": True}], lr=lr),
        TORCH: torch.optim.Muon(copies(stacks, apart=True), lr=lr, adjust_lr_fn="match_rms_adamw"),
    }


def step_ms(optimizer: Optimizer) -> float:
    began = time.process_time()
    optimizer.step()
    return 1e3 * (time.process_time() - began)


@process_settings()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds. Default: 15")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, config in MODELS.items():
        torch.manual_seed(0)
        stacks = stacks_of(build_model(config(), VOCAB))
        for stack in stacks:
            stack.grad = torch.randn_like(stack)
        contenders = optimizers(stacks)
        rounds = [{each: step_ms(optimizer) for each, optimizer in contenders.items()} for _ in range(args.rounds + 1)]
        for each in contenders:
            taken = [seconds[each] for seconds in rounds[1:]]  # the first allocates states
            rows.append(
                {
                    "model": name,
                    "matrices": sum(len(stack) if stack.ndim == 3 else 1 for stack in stacks),
                    "parameters": sum(stack.numel() for stack in stacks),
                    "contender": each,
                    "ms": round(statistics.median(taken), 2),
                    "fastest ms": round(min(taken), 2),
                    "slowest ms": round(max(taken), 2),
                }
            )
    write_report("muon_step", rows, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
