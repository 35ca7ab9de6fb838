"""Speed and memory of expert parallelism compared with plain DDP, by model size, on gloo.

    python benchmarks/speed/ep_crossover.py                      2 and 4 processes, about half an hour on two cores
    python benchmarks/speed/ep_crossover.py --worlds 2 --only memory
    python benchmarks/speed/ep_crossover.py --only plot          draw docs/images/ep_crossover.png from the result

The models of `ep_speed.py` (Qwen3-MoE, four layers, float32, 2,048 tokens a step; forward, backward, clipping, AdamW)
with experts of four sizes, top 2 of 16 and top 8 of 64: plain DDP, which averages the gradients of all experts;
transformers' expert parallelism with DDP for the other parameters; the toolkit. Variants take turns in rounds. Figures
are medians over rounds of the ratio to plain DDP in the same round.

Memory: models grow in experts until a process allocates more than the limit beyond its imports, while it loads the
model or in two training steps. The toolkit loads experts lazily.

Writes benchmarks/results/ep_crossover.json, ep_memory.json and docs/images/ep_crossover.png.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from benchmarks.speed.ep_speed import (
    BY_HAND,
    LENGTH,
    OURS,
    PLAIN,
    STEPS_PER_TURN,
    TOKENS,
    VARIANTS,
    VOCAB,
    save_model,
    time_variants,
    use_kernel,
)
from benchmarks.speed.large_checkpoint import Watch
from benchmarks.support.processes import run_distributed
from toolkit.run.pictures.plots import GREY, colour_of, save_figure
from toolkit.run.process_settings import process_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPES = [(128, 128, 16, 2), (256, 512, 16, 2), (512, 1024, 16, 2), (256, 512, 64, 8)]
"""Width, hidden width, experts, top-k."""
COMPARED = (PLAIN, BY_HAND, OURS)
LIMIT_GB = 3.0
MEMORY_SHAPE = (256, 1024)
EXPERT_COUNTS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
"""Experts per layer, tried in this order."""


def speeds(world: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for dim, hidden, experts, top_k in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            parameters = save_model(Path(folder), dim, hidden, experts, top_k)
            seconds = run_distributed(time_variants, world, Path(folder), rounds, COMPARED, timeout_s=3000)[0]
        for name, each in seconds.items():
            ratios = [plain / own for plain, own in zip(seconds[PLAIN], each, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "processes": world,
                    "dim": dim,
                    "hidden": hidden,
                    "experts": experts,
                    "top k": top_k,
                    "million parameters": round(parameters / 1e6, 1),
                    "contender": name,
                    "tokens/s": round(STEPS_PER_TURN * TOKENS / statistics.median(each)),
                    "x plain DDP": round(statistics.median(ratios), 3),
                    "quartiles": f"{low:.3f} to {high:.3f}",
                }
            )
        print(f"{world} processes, {dim} x {hidden}, top {top_k} of {experts}: done", flush=True)
    return rows


@process_settings()
def trains_within(folder: Path, name: str, limit_gb: float) -> bool:
    """Train two steps; the process ends if its memory grows by more than `limit_gb`."""
    use_kernel()
    watch = Watch(math.inf)
    watch.limit = watch.before + limit_gb * 1e9
    step = VARIANTS[name](folder)
    for _ in range(2):
        step(torch.randint(VOCAB, (TOKENS // dist.get_world_size() // LENGTH, LENGTH)))
    return True


def largest(world: int, name: str, limit_gb: float) -> dict[str, Any]:
    """Return the row of the largest model that a variant trains."""
    found: dict[str, Any] = {"processes": world, "contender": name, "experts": 0, "million parameters": 0.0}
    for experts in EXPERT_COUNTS:
        with tempfile.TemporaryDirectory() as folder:
            parameters = save_model(Path(folder), *MEMORY_SHAPE, experts, 2)
            try:
                run_distributed(trains_within, world, Path(folder), name, limit_gb, timeout_s=600)
            except AssertionError as error:
                if "exited without a result" not in str(error):
                    raise
                return found | {"refused at, million parameters": round(parameters / 1e6, 1)}
        found |= {"experts": experts, "million parameters": round(parameters / 1e6, 1)}
    return found | {"refused at, million parameters": None}


def draw(figure: Figure, rows: list[dict[str, Any]]) -> None:
    """Plot the throughput of each variant relative to plain DDP, by parameters."""
    worlds = sorted({row["processes"] for row in rows})
    figure.set_size_inches(4.2 * len(worlds), 3.4)
    for axes, world in zip(figure.subplots(1, len(worlds), sharey=True, squeeze=False)[0], worlds, strict=True):
        for number, name in enumerate(COMPARED):
            own = [row for row in rows if row["processes"] == world and row["contender"] == name and row["top k"] == 2]
            own.sort(key=lambda row: row["million parameters"])
            sizes, ratios = [row["million parameters"] for row in own], [row["x plain DDP"] for row in own]
            axes.plot(sizes, ratios, color=colour_of(number), marker="o", ms=4, label=name.replace("ours", "toolkit"))
        axes.set(xscale="log", xlabel="million parameters", title=f"{world} processes, top 2 of 16")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes], minor=False)
        axes.minorticks_off()
        axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    figure.axes[0].set_ylabel("tokens per second over plain DDP")
    figure.axes[0].legend()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["speed", "memory", "plot"])
    parser.add_argument("--limit-gb", type=float, default=LIMIT_GB)
    options = parser.parse_args()
    if options.only in (None, "speed"):
        rows = [row for world in options.worlds for row in speeds(world, options.rounds)]
        write_report("ep_crossover", rows, rounds=options.rounds, tokens_per_step=TOKENS)
    if options.only != "memory":
        rows = json.loads((ROOT / "benchmarks" / "results" / "ep_crossover.json").read_text())["rows"]
        save_figure(ROOT / "docs" / "images" / "ep_crossover.png", partial(draw, rows=rows))
    if options.only in (None, "memory"):
        found = [largest(world, name, options.limit_gb) for world in options.worlds for name in (PLAIN, OURS)]
        write_report(
            "ep_memory", found, gigabytes_of_a_process=options.limit_gb, dim=MEMORY_SHAPE[0], hidden=MEMORY_SHAPE[1]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
