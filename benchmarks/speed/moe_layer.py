"""What a mixture-of-experts layer costs beside a dense one of the same FLOPs, and beside transformers' Mixtral block.

    python benchmarks/speed/moe_layer.py                   two threads and one; a minute when idle, ten when busy

Forward and backward of the whole layer on a CPU in float32: router, dispatch, experts, combine; gradients of the input
and of every weight, freshly allocated (`set_to_none`), for a random output gradient. SwiGLU, dim 256, hidden 512,
top-2, 2,048 tokens: the dense floor is one SwiGLU network with hidden 1,024; beside it stands one with hidden 512 that
gets each token twice, which is the same FLOPs and as many rows as a mixture has to move. Ours and Mixtral's hold the
same weights, and must agree in output and gradients before anything is timed. A second job is the MNIST layer: 64
tokens, ReLU, hidden 256, in ten times as many rounds.

All contenders run in one process, in rounds in which each has its turn; figures are medians over rounds of the ratio to
the dense floor in the same round. With one thread the clock is the process's CPU time, which other programs on the
machine disturb little; with more it is wall time. glibc keeps freed memory for all contenders, as `start_run` tells it.
Writes a table and benchmarks/results/moe_layer.json; exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from benchmarks.report import write_report
from toolkit.experts.layer.grouped_experts import Activation
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.run.process_settings import process_settings

DIM, TOP_K = 256, 2
MOST_TIMES_DENSE = {8: 1.15, 16: 1.15, 64: 1.5}
"""The target for each number of experts."""
SLOW, SLOW_ROUNDS = 4, 3
"""Who takes this many times dense sits out after so many rounds."""
SMALL_ROUNDS = 10
"""Factor of the rounds for the small layer: its rounds take milliseconds, so another program would disturb all."""


class Dense(nn.Module):
    """Dense network with the size of a token's K experts together."""

    def __init__(self, hidden_dim: int, activation: Activation):
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(DIM, hidden_dim * (2 if activation == "swiglu" else 1), bias=False)
        self.down = nn.Linear(hidden_dim, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.activation == "relu":
            return self.down(hidden.relu())
        gate, hidden = hidden.chunk(2, dim=-1)
        return self.down(F.silu(gate) * hidden)


class DensePerAssignment(nn.Module):
    """Dense network with the FLOPs and rows of an MoE layer: each token passes a narrower network `TOP_K` times."""

    def __init__(self, hidden_dim: int, activation: Activation):
        super().__init__()
        self.network = Dense(hidden_dim, activation)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.network(x.repeat(TOP_K, 1, 1))
        return rows.sum(0, keepdim=True)


def mixtral(ours: MoE, implementation: str) -> nn.Module:
    """Return transformers' Mixtral block with the weights of `ours`."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    experts, dim, hidden_dim = ours.experts.down.shape[0], ours.experts.down.shape[2], ours.experts.down.shape[1]
    config = MixtralConfig(
        hidden_size=dim, intermediate_size=hidden_dim, num_local_experts=experts, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(ours.experts.up)
        block.experts.down_proj.copy_(ours.experts.down.transpose(1, 2))
    return block


def mixtral_implementations() -> list[str]:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ["eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]


class Step:
    """One forward and backward with the same input and output gradient for everybody."""

    def __init__(self, tokens: int):
        draws = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, tokens, DIM, generator=draws).requires_grad_()
        self.grad = torch.randn(1, tokens, DIM, generator=draws)

    def __call__(self, module: nn.Module) -> Tensor:
        module.zero_grad(set_to_none=True)
        self.x.grad = None
        y: Tensor = module(self.x)
        y.backward(self.grad)
        return y.detach()

    def seconds(self, module: nn.Module, threads: int, repeats: int) -> float:
        clock = time.process_time if threads == 1 else time.perf_counter
        start = clock()
        for _ in range(repeats):
            self(module)
        return (clock() - start) / repeats


def relative_error(ours: MoE, block: nn.Module, step: Step) -> float:
    """Return the largest relative difference of output and gradients between `ours` and `block`."""

    def results(module: Any, down: Tensor, router: Tensor) -> list[Tensor | None]:
        y = step(module)
        up = module.experts.up if isinstance(module, MoE) else module.experts.gate_up_proj
        return [y, step.x.grad, up.grad, down.grad, router.grad]

    mine = results(ours, ours.experts.down, ours.router.weight)
    block_: Any = block
    theirs = results(block, block_.experts.down_proj, block_.gate.weight)
    assert mine[3] is not None
    mine[3] = mine[3].transpose(1, 2)
    errors = []
    for one, other in zip(mine, theirs, strict=True):
        assert one is not None
        assert other is not None
        errors.append(float((one - other).norm() / other.norm()))
    return max(errors)


def enter(ours: MoE, step: Step, threads: int) -> dict[str, nn.Module]:
    """Return every implementation of Mixtral's experts that runs here. Raises if one differs from `ours`."""
    entered: dict[str, nn.Module] = {}
    assignments, bytes_per_expert = step.x.shape[1] * TOP_K, 4 * ours.experts.up[0].numel()
    for name in mixtral_implementations():
        # batched_mm copies an expert's weights for every assignment, and again for their gradient.
        if name == "batched_mm" and 6 * assignments * bytes_per_expert > psutil.virtual_memory().available:
            print(f"transformers {name} is left out: it would fill more than half of the memory with copies of weights")
            continue
        torch.set_num_threads(threads)
        block = mixtral(ours, name)
        try:
            error = relative_error(ours, block, step)
        except Exception as problem:
            print(f"transformers {name} does not run here: {str(problem).splitlines()[0][:100]}")
            continue
        if error > 1e-5:
            raise AssertionError(f"ours and transformers {name} differ by {error:.1e}")
        entered[f"transformers {name}"] = block
    return entered


def measure(
    tokens: int, experts: int, hidden_dim: int, activation: Activation, rounds: int, threads: int
) -> list[dict[str, Any]]:
    """One row per contender; the first round is not counted."""
    torch.set_num_threads(threads)
    step, ours = Step(tokens), make_moe(DIM, hidden_dim, experts, TOP_K, activation=activation)
    contenders: dict[str, nn.Module] = {
        "dense": Dense(TOP_K * hidden_dim, activation),
        "dense, a row per assignment": DensePerAssignment(hidden_dim, activation),
        "ours": ours,
    }
    if activation == "swiglu":
        contenders |= enter(ours, step, threads)
    repeats = max(1, 1024 // tokens)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, module in contenders.items():
            if turn > SLOW_ROUNDS and min(seconds[name]) > SLOW * min(seconds["dense"]):
                continue
            taken = step.seconds(module, threads, repeats)
            if turn:
                seconds[name].append(taken)
            module.zero_grad(set_to_none=True)

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=False))

    return [
        {
            "threads": threads,
            "tokens": tokens,
            "experts": experts,
            "contender": name,
            "ms": round(1e3 * statistics.median(seconds[name]), 2),
            "times dense": round(ratio(name, "dense"), 3),
            "fastest, times dense": round(min(seconds[name]) / min(seconds["dense"]), 3),
            "times ours": round(ratio(name, "ours"), 3),
        }
        for name in contenders
    ]


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each target that was missed."""
    missed = []
    for row in rows:
        place = f"{row['threads']} thread(s), {row['experts']} experts"
        limit = MOST_TIMES_DENSE.get(row["experts"], float("inf"))
        if row["tokens"] == 2048 and row["contender"] == "ours" and row["times dense"] > limit:
            missed.append(f"{place}: ours is {row['times dense']} times dense, wanted {limit}")
        if row["contender"].startswith("transformers") and row["times ours"] < 1:
            missed.append(f"{place}: {row['contender']} is faster, {row['times ours']} times ours")
    return missed


@process_settings()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 64])
    args = parser.parse_args()

    rows = []
    for threads in args.threads:
        for experts in args.experts:
            rows += measure(2048, experts, 512, "swiglu", args.rounds, threads)
        rows += measure(64, 8, 256, "relu", SMALL_ROUNDS * args.rounds, threads)
    write_report("moe_layer", rows, rounds=args.rounds, dim=DIM, top_k=TOP_K, malloc="freed memory is kept")
    missed = judge(rows)
    print("\n".join(missed) or "every target is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
