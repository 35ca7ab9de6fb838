"""MoE layer compared with a dense layer of the same FLOPs and with transformers' Mixtral block on a CPU.

    python benchmarks/speed/moe_layer.py                   two threads and one; a minute when idle, ten when busy

Forward and backward pass of the layer in float32: router, dispatch, experts, combine, and newly allocated gradients of
input and weights (`set_to_none`). SwiGLU, dim 256, hidden 512, top 2, 2,048 tokens. The dense baseline has hidden
1,024; a second one has hidden 512 and gets each token twice: the FLOPs and rows of the MoE layer. A variant of the
toolkit's layer copies rows for each pair and multiplies outputs by routing weights. The toolkit's layers and the
Mixtral blocks have the same weights; outputs and gradients are compared before timing. The second job is the MNIST
layer: 64 tokens, ReLU, hidden 256, ten times the rounds. `saved MB` is the memory of the tensors that a forward pass
saves, without parameters.

Variants run in one process in interleaved rounds; values are medians over rounds of the ratio to the dense baseline in
the same round. With one thread the clock is CPU time, with more wall time. glibc keeps freed memory, as in
`start_run`. Writes benchmarks/results/moe_layer.json; exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import copy
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
from toolkit.experts.layer.grouped_experts import Activation, GroupedExperts
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.run.process_settings import process_settings

DIM, TOP_K = 256, 2
MOST_TIMES_DENSE = {8: 1.15, 16: 1.15, 64: 1.4}
"""Target by number of experts. With 64 experts the grouped products alone take 1.37."""
SLOW, SLOW_ROUNDS = 4, 3
"""A variant `SLOW` times slower than dense stops after `SLOW_ROUNDS`."""
SMALL_ROUNDS = 10
"""Factor of the rounds for the small layer, whose rounds take only milliseconds."""


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


class OwnExperts(GroupedExperts):
    """Experts that the layer treats as a user's: it copies a row for each pair and multiplies outputs by weights."""

    def forward(self, x: Tensor, rows_per_slot: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, rows_per_slot)


def with_copies(layer: MoE) -> MoE:
    """Return `layer` with copies of rows for its experts."""
    other = copy.deepcopy(layer)
    other.experts.__class__ = OwnExperts
    return other


def mixtral(layer: MoE, implementation: str) -> nn.Module:
    """Return transformers' Mixtral block with the weights of `layer`."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    experts, hidden_dim, dim = layer.experts.down.shape
    config = MixtralConfig(
        hidden_size=dim, intermediate_size=hidden_dim, num_local_experts=experts, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(layer.experts.up)
        block.experts.down_proj.copy_(layer.experts.down.transpose(1, 2))
    return block


def mixtral_implementations() -> list[str]:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ["eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]


class Step:
    """Forward and backward pass with the same input and output gradient for all variants."""

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

    def saved_bytes(self, module: nn.Module) -> int:
        """Return the bytes of the tensors that a forward pass saves, each storage once, without parameters."""
        kept: dict[int, int] = {}

        def keep(value: Tensor) -> Tensor:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            y = module(self.x)
        for parameter in module.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        del y
        return sum(kept.values())

    def seconds(self, module: nn.Module, threads: int, repeats: int) -> float:
        clock = time.process_time if threads == 1 else time.perf_counter
        start = clock()
        for _ in range(repeats):
            self(module)
        return (clock() - start) / repeats


def results(module: Any, step: Step) -> list[Tensor]:
    """Return the output and the gradients of the input, both weights and the router."""
    y = step(module)
    if isinstance(module, MoE):
        grads = step.x.grad, module.experts.up.grad, module.experts.down.grad, module.router.weight.grad
    else:
        down = module.experts.down_proj.grad.transpose(1, 2)
        grads = step.x.grad, module.experts.gate_up_proj.grad, down, module.gate.weight.grad
    return [y, *grads]


def require_equal(layer: MoE, other: nn.Module, step: Step, name: str) -> None:
    """Raise AssertionError if outputs or gradients of `layer` and `other` differ."""
    pairs = zip(results(layer, step), results(other, step), strict=True)
    error = max(float((one - another).norm() / another.norm()) for one, another in pairs)
    if error > 1e-5:
        raise AssertionError(f"the toolkit's layer and {name} differ by {error:.1e}")


def mixtral_variants(layer: MoE, step: Step, threads: int) -> dict[str, nn.Module]:
    """Return the Mixtral block with every available experts implementation. Raises if one differs from `layer`."""
    blocks: dict[str, nn.Module] = {}
    assignments, bytes_per_expert = step.x.shape[1] * TOP_K, 4 * layer.experts.up[0].numel()
    for name in mixtral_implementations():
        # batched_mm copies the expert's weights for every assignment, and again for the gradients.
        if name == "batched_mm" and 6 * assignments * bytes_per_expert > psutil.virtual_memory().available:
            print(f"transformers {name} is skipped: its copies of weights need more than half of the memory")
            continue
        torch.set_num_threads(threads)
        block = mixtral(layer, name)
        try:
            step(block)
        except Exception as problem:
            print(f"transformers {name} failed: {str(problem).splitlines()[0][:100]}")
            continue
        require_equal(layer, block, step, f"transformers {name}")
        blocks[f"transformers {name}"] = block
    return blocks


def measure(
    tokens: int, experts: int, hidden_dim: int, activation: Activation, rounds: int, threads: int
) -> list[dict[str, Any]]:
    """Return a row for each variant; the first round is a warm-up."""
    torch.set_num_threads(threads)
    step, layer = Step(tokens), make_moe(DIM, hidden_dim, experts, TOP_K, activation=activation)
    variants: dict[str, nn.Module] = {
        "dense": Dense(TOP_K * hidden_dim, activation),
        "dense, a row per assignment": DensePerAssignment(hidden_dim, activation),
        "ours": layer,
        "ours, with copies": with_copies(layer),
    }
    require_equal(layer, variants["ours, with copies"], step, "the layer with copies")
    if activation == "swiglu":
        variants |= mixtral_variants(layer, step, threads)
    saved = {name: step.saved_bytes(module) for name, module in variants.items()}
    repeats = max(1, 1024 // tokens)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, module in variants.items():
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
            "saved MB": round(saved[name] / 1e6, 1),
        }
        for name in variants
    ]


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """Return a message for each missed target."""
    missed = []
    for row in rows:
        place = f"{row['threads']} thread(s), {row['experts']} experts"
        limit = MOST_TIMES_DENSE.get(row["experts"], float("inf"))
        if row["tokens"] == 2048 and row["contender"] == "ours" and row["times dense"] > limit:
            missed.append(f"{place}: {row['times dense']} times dense, target {limit}")
        if row["contender"].startswith("transformers") and row["times ours"] < 1:
            missed.append(f"{place}: {row['contender']} is faster, {row['times ours']} times the toolkit's time")
    return missed


@process_settings()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds. Default: 15")
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
    print("\n".join(missed) or "all targets are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
