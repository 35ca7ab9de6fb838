"""How much of a chip's own bf16 matrix rate the mixture layer reaches, at three realistic shapes.

    python benchmarks/speed/gpu_layer.py                   on a GPU, about three minutes
    python benchmarks/speed/gpu_layer.py --rehearse        anywhere: tiny shapes in float32, to see that it runs

Forward and backward of the whole layer: router, dispatch, experts, combine, gradients of input and weights. Beside it
the layer compiled with `torch.compile`, transformers' block with the same sizes and every experts implementation that
it has and that runs here (`sonicmoe` and `deepgemm` need packages of their own), and the six grouped products alone
through `torch.nn.functional.grouped_mm`, which is the ceiling for any layer built on them. The chip's rate is measured
in the same run: the fastest square bf16 product out of a few sizes. FLOPs are those of the routed experts' products, 6
per weight and row; routers and passes between products count as time, not as FLOPs. Of the sizes of DeepSeek-V3, whose
256 experts are spread over eight chips, a chip's 32 experts get as many rows as they would get there.

Contenders run in interleaved rounds; figures are medians over rounds, and a contender that fails is a row that says
why. The goals: 45 % of the rate at the sizes of Qwen3, and never slower than transformers' `grouped_mm`. Writes a table
and benchmarks/results/gpu_layer.json; exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from transformers import MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.errors import one_line
from toolkit.experts.layer.moe_layer import make_moe


class Shape(NamedTuple):
    """A SwiGLU mixture: `hidden` is an expert's width, `tokens` those of a step on one chip."""

    name: str
    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int

    @property
    def flops(self) -> float:
        """Of the experts' products, forward and backward: 2 per weight and row, three times."""
        return 6.0 * self.tokens * self.top_k * 3 * self.dim * self.hidden


QWEN3, OURS, GROUPED = "Qwen3-MoE-like", "ours", "transformers grouped_mm"
LEAST_SHARE = 0.45
"""The goal at the sizes of Qwen3."""
SHAPES = [
    Shape(QWEN3, 16384, 2048, 768, 128, 8),
    Shape("Mixtral-like", 8192, 4096, 14336, 8, 2),
    Shape("DeepSeek-V3-like", 8192, 7168, 2048, 32, 8),
]
REHEARSAL = [Shape("tiny", 64, 32, 16, 4, 2)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes in float32 on whatever device there is")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        raise SystemExit("error: this machine has no GPU: use --rehearse to see that the benchmark runs.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if arguments.rehearse else torch.bfloat16
    rate = matrix_rate(device, dtype, [64] if arguments.rehearse else [4096, 8192, 16384])
    rows: list[dict[str, Any]] = []
    for shape in REHEARSAL if arguments.rehearse else SHAPES:
        rows += measure(shape, device, dtype, rate, arguments.rounds)
        if not arguments.rehearse:  # after each shape, so that who ends it has those before
            write_report("gpu_layer", rows, teraflops_per_second=round(rate / 1e12, 1), rounds=arguments.rounds)
    if arguments.rehearse:
        print(*rows, sep="\n")
        return 0
    missed = missed_goals(rows)
    print(*missed, sep="\n")
    return int(bool(missed))


def missed_goals(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each."""
    missed = []
    for row in rows:
        if row["contender"] == OURS and row["failed"]:
            missed.append(f"{row['shape']}: ours failed: {row['failed']}")
        elif row["contender"] == OURS and row["shape"] == QWEN3 and (row["share"] or 0) < LEAST_SHARE:
            missed.append(f"{QWEN3}: ours has {row['share']} of the chip's rate, wanted {LEAST_SHARE}")
        if row["contender"] == GROUPED and (row["ours is faster by"] or 1) < 1:
            missed.append(f"{row['shape']}: ours has {row['ours is faster by']} times the speed of {GROUPED}, wanted 1")
    return missed


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, rate: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender."""
    candidates: dict[str, Callable[[], Callable[[], None]]] = {
        OURS: lambda: ours(shape, device, dtype),
        "ours, compiled": lambda: ours(shape, device, dtype, compiled=True),
        "grouped products alone": lambda: products(shape, device, dtype),
    }
    for name in ("eager", *sorted(ALL_EXPERTS_FUNCTIONS.keys())):
        candidates[f"transformers {name}"] = partial(transformers_block, shape, device, dtype, name)
    contenders: dict[str, Callable[[], None]] = {}
    failed: dict[str, str] = {}
    for name, make in candidates.items():
        try:
            work = make()
            work()
        except Exception as reason:  # each misses something else: a package, a kernel, memory
            failed[name] = one_line(reason)
        else:
            contenders[name] = work
        work = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 3):
        for name, work in contenders.items():
            took = timed(work, device)
            if round_ >= 3:
                seconds[name].append(took)
    rows = []
    for name in candidates:
        found: dict[str, Any] = dict.fromkeys(("ms", "share", "ours is faster by"))
        if name in seconds:
            median = statistics.median(seconds[name])
            found |= {"ms": round(1e3 * median, 3), "share": round(shape.flops / median / rate, 3)}
        if name in seconds and OURS in seconds:
            ratios = [theirs / mine for theirs, mine in zip(seconds[name], seconds[OURS], strict=True)]
            found["ours is faster by"] = round(statistics.median(ratios), 3)
        rows.append({"shape": shape.name, "contender": name, **found, "failed": failed.get(name)})
    return rows


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds until the device has done `work`."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def matrix_rate(device: torch.device, dtype: torch.dtype, sizes: list[int]) -> float:
    """FLOP per second of the fastest square product."""
    best = 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = [timed(partial(_multiply, a, b, out), device) for _ in range(13)]
        best = max(best, 2 * size**3 / statistics.median(seconds[3:]))
    return best


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def step(model: torch.nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Forward and backward with fresh gradients, whose memory the next contender gets."""

    def work() -> None:
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).backward(grad)
        model.zero_grad(set_to_none=True)
        x.grad = None

    return work


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, shape.tokens, shape.dim, device=device, dtype=dtype)
    return x.requires_grad_(), torch.randn_like(x)


@lru_cache(maxsize=1)  # drawing 1.4 billion weights takes ten seconds
def _layer(shape: Shape, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    return make_moe(shape.dim, shape.hidden, shape.experts, shape.top_k, activation="swiglu").to(device, dtype)


def ours(shape: Shape, device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> Callable[[], None]:
    layer = _layer(shape, device, dtype)
    if compiled:
        backend = "inductor" if device.type == "cuda" else "aot_eager"  # which needs no C++ compiler
        layer = torch.compile(layer, backend=backend)  # type: ignore[assignment]
    return step(layer, *inputs(shape, device, dtype))


def transformers_block(
    shape: Shape, device: torch.device, dtype: torch.dtype, experts_implementation: str
) -> Callable[[], None]:
    config = MixtralConfig(
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = experts_implementation
    with device:
        block = MixtralSparseMoeBlock(config).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return step(block, *inputs(shape, device, dtype))


def products(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """The six grouped products, on equally many rows per expert."""
    rows = shape.tokens * shape.top_k
    ends = (torch.arange(1, shape.experts + 1, device=device) * rows // shape.experts).int()

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    x, hidden, wide = random(rows, shape.dim), random(rows, shape.hidden), random(rows, 2 * shape.hidden)
    up, down = random(shape.experts, 2 * shape.hidden, shape.dim), random(shape.experts, shape.hidden, shape.dim)

    def work() -> None:
        grouped_mm(x, up.transpose(1, 2), offs=ends)
        grouped_mm(hidden, down, offs=ends)
        grouped_mm(x, down.transpose(1, 2), offs=ends)
        grouped_mm(wide, up, offs=ends)
        grouped_mm(wide.t(), x, offs=ends)
        grouped_mm(hidden.t(), x, offs=ends)

    return work


if __name__ == "__main__":
    sys.exit(main())
