"""MoE layer on a GPU: share of the chip's measured bf16 matmul rate at three realistic shapes.

    python benchmarks/speed/gpu_layer.py                   on a GPU, about three minutes
    python benchmarks/speed/gpu_layer.py --rehearse        on any device: tiny shapes in float32; writes nothing

Forward and backward pass of the layer: router, dispatch, experts, combine, gradients of input and weights. Variants are
the layer, the layer under `torch.compile`, transformers' block with every available experts implementation (`sonicmoe`
and `deepgemm` need additional packages), and the six grouped products through `torch.nn.functional.grouped_mm`, an
upper bound. The chip's rate is the fastest square bf16 product of a few sizes in the same run. FLOPs count only the
products of routed experts, 6 per weight and row. The DeepSeek-V3 shape has the 32 experts and the rows of one of eight
chips.

Variants run in interleaved rounds; times are medians over rounds. A failing variant has a row with its error. Targets:
45 % of the rate at the Qwen3 shape, and at least the speed of transformers' `grouped_mm`. Writes
benchmarks/results/gpu_layer.json; exit code 1 if a target is missed.
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
    """A SwiGLU MoE layer with expert width `hidden` and `tokens` per step and chip."""

    name: str
    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int

    @property
    def flops(self) -> float:
        """FLOPs of the experts' products in a forward and backward pass: 6 per weight and row."""
        return 6.0 * self.tokens * self.top_k * 3 * self.dim * self.hidden


QWEN3, OURS, GROUPED = "Qwen3-MoE-like", "ours", "transformers grouped_mm"
LEAST_SHARE = 0.45
"""Target at the Qwen3 shape."""
SHAPES = [
    Shape(QWEN3, 16384, 2048, 768, 128, 8),
    Shape("Mixtral-like", 8192, 4096, 14336, 8, 2),
    Shape("DeepSeek-V3-like", 8192, 7168, 2048, 32, 8),
]
REHEARSAL = [Shape("tiny", 64, 32, 16, 4, 2)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes in float32 on any device; writes nothing")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        raise SystemExit("error: no GPU is available. Use --rehearse for a test run on the CPU.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if arguments.rehearse else torch.bfloat16
    rate = matrix_rate(device, dtype, [64] if arguments.rehearse else [4096, 8192, 16384])
    rows: list[dict[str, Any]] = []
    for shape in REHEARSAL if arguments.rehearse else SHAPES:
        rows += measure(shape, device, dtype, rate, arguments.rounds)
        if not arguments.rehearse:  # after each shape, for interrupted runs
            write_report("gpu_layer", rows, teraflops_per_second=round(rate / 1e12, 1), rounds=arguments.rounds)
    if arguments.rehearse:
        print(*rows, sep="\n")
        return 0
    missed = missed_targets(rows)
    print(*missed, sep="\n")
    return int(bool(missed))


def missed_targets(rows: list[dict[str, Any]]) -> list[str]:
    """Return a message for each missed target."""
    missed = []
    for row in rows:
        if row["contender"] == OURS and row["failed"]:
            missed.append(f"{row['shape']}: the toolkit's layer failed: {row['failed']}")
        elif row["contender"] == OURS and row["shape"] == QWEN3 and (row["share"] or 0) < LEAST_SHARE:
            missed.append(f"{QWEN3}: {row['share']} of the chip's rate, target {LEAST_SHARE}")
        if row["contender"] == GROUPED and (row["ours is faster by"] or 1) < 1:
            missed.append(f"{row['shape']}: {row['ours is faster by']} times the speed of {GROUPED}, target 1")
    return missed


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, rate: float, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    candidates: dict[str, Callable[[], Callable[[], None]]] = {
        OURS: lambda: toolkit_layer(shape, device, dtype),
        "ours, compiled": lambda: toolkit_layer(shape, device, dtype, compiled=True),
        "grouped products alone": lambda: products(shape, device, dtype),
    }
    for name in ("eager", *sorted(ALL_EXPERTS_FUNCTIONS.keys())):
        candidates[f"transformers {name}"] = partial(transformers_block, shape, device, dtype, name)
    works: dict[str, Callable[[], None]] = {}
    failed: dict[str, str] = {}
    for name, make in candidates.items():
        try:
            work = make()
            work()
        except Exception as reason:  # a missing package or kernel, or out of memory
            failed[name] = one_line(reason)
        else:
            works[name] = work
        work = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 3):
        for name, work in works.items():
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
            ratios = [other / own for other, own in zip(seconds[name], seconds[OURS], strict=True)]
            found["ours is faster by"] = round(statistics.median(ratios), 3)
        rows.append({"shape": shape.name, "contender": name, **found, "failed": failed.get(name)})
    return rows


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of `work` on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def matrix_rate(device: torch.device, dtype: torch.dtype, sizes: list[int]) -> float:
    """Return FLOP/s of the fastest square product."""
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
    """Return a forward and backward pass that frees its gradients."""

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


def toolkit_layer(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, compiled: bool = False
) -> Callable[[], None]:
    layer = _layer(shape, device, dtype)
    if compiled:
        backend = "inductor" if device.type == "cuda" else "aot_eager"  # aot_eager needs no C++ compiler
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
    """Return the six grouped products with equal rows per expert."""
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
