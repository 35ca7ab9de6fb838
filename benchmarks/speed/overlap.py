"""Tokens in chunks: how much of the exchange of rows is under way while a process computes, and what a step takes.

    python benchmarks/speed/overlap.py                 two processes on gloo, a minute

A layer of 16 experts on two processes, forward and backward, with `--dispatch-chunks` 1, 2 and 4 in interleaved rounds.
Times are medians of steps without a profiler. `overlapped` is read from a trace of torch's profiler: the share of the
time in which an all-to-all is under way, of which this process spends in an operation at the same time. On two cores
the exchange takes processor time from the experts of both processes, so nothing is gained here; on GPUs rows travel by
themselves. Writes benchmarks/results/overlap.json and docs/images/overlap.png, one step of the first process with one
and with four chunks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.run.pictures.plots import palette, save_figure
from toolkit.run.process_settings import process_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 512, 16, 2, 2048
CHUNKS = (1, 2, 4)
SHOWN = (1, 4)
STEP = "step"

Spans = list[tuple[float, float]]
"""Begin and end, in microseconds; sorted, and apart from each other."""


def united(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same times as `spans`, which may overlap."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def shared(one: Spans, other: Spans) -> float:
    """How long both last at the same time, in microseconds."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def read_trace(path: Path) -> tuple[Spans, Spans, Spans]:
    """The steps, the all-to-alls under way, and the operations that this process computes."""
    steps, exchanges, computes = [], [], []
    for event in json.loads(path.read_text())["traceEvents"]:
        name, begin, seconds = event.get("name", ""), event.get("ts", 0.0), event.get("dur", 0.0)
        span = (begin, begin + seconds)
        if name == STEP and event.get("cat") == "user_annotation":
            steps.append(span)
        elif name == "gloo:all_to_all":
            exchanges.append(span)
        elif event.get("cat") == "cpu_op" and name.startswith("aten::"):
            computes.append(span)
    return united(steps), united(exchanges), united(computes)


def measure(rank: int, world: int, folder: str, rounds: int) -> None:
    """Writes the times of this process and its traces to `folder`."""
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.set_num_threads(1)
    with process_settings():
        layers = {}
        for chunks in CHUNKS:
            torch.manual_seed(0)
            groups = make_expert_groups(world, dispatch_chunks=chunks)
            layers[chunks] = make_moe(DIM, HIDDEN, EXPERTS, TOP_K, groups=groups, activation="swiglu")
        torch.manual_seed(rank)
        x = torch.randn(TOKENS // world, DIM, requires_grad=True)
        upstream = torch.randn_like(x)

        def step(chunks: int) -> None:
            layers[chunks].zero_grad(set_to_none=True)
            x.grad = None
            layers[chunks](x).backward(upstream)

        seconds: dict[int, list[float]] = {chunks: [] for chunks in CHUNKS}
        for turn in range(rounds + 2):
            for chunks in CHUNKS:
                dist.barrier()
                began = time.perf_counter()
                step(chunks)
                if turn >= 2:
                    seconds[chunks].append(time.perf_counter() - began)
        for chunks in CHUNKS:
            with profile(activities=[ProfilerActivity.CPU]) as traced:
                for _ in range(8):
                    dist.barrier()
                    with record_function(STEP):
                        step(chunks)
            traced.export_chrome_trace(f"{folder}/{chunks}-{rank}.json")
    Path(folder, f"seconds-{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def within(spans: Spans, outer: tuple[float, float]) -> Spans:
    begin, end = outer
    return [(max(a, begin), min(b, end)) for a, b in spans if a < end and b > begin]


def draw(figure: Figure, traces: dict[int, tuple[Spans, Spans, Spans]]) -> None:
    """A row of computing and one of all-to-alls for each number of chunks, in the step of median length."""
    figure.set_size_inches(9, 3.4)
    travel, compute = palette(2)
    axes: Any = figure.subplots(len(traces), 1, sharex=True)
    for row, (chunks, (steps, exchanges, computes)) in zip(axes, traces.items(), strict=True):
        step = sorted(steps, key=lambda span: span[1] - span[0])[len(steps) // 2]
        for place, (spans, colour) in enumerate(((exchanges, travel), (computes, compute))):
            bars = [((a - step[0]) / 1e3, (b - a) / 1e3) for a, b in within(spans, step)]
            row.broken_barh(bars, (place - 0.4, 0.8), color=colour)
        row.set_yticks([0, 1], ["all-to-all under way", "computes"])
        row.set_ylim(-0.6, 1.6)
        row.set_title(f"--dispatch-chunks {chunks}")
    axes[-1].set_xlabel("milliseconds of one step, forward and backward")


def rows_of(traces: dict[int, list[tuple[Spans, Spans, Spans]]], seconds: Sequence[Any]) -> list[dict[str, Any]]:
    """A row per number of chunks; of both processes together."""
    rows = []
    for chunks in CHUNKS:
        slowest = [max(each) for each in zip(*(found[str(chunks)] for found in seconds), strict=True)]
        least = [max(each) for each in zip(*(found["1"] for found in seconds), strict=True)]
        travels = sum(length(exchanges) for _, exchanges, _ in traces[chunks])
        both = sum(shared(exchanges, computes) for _, exchanges, computes in traces[chunks])
        rows.append(
            {
                "chunks": chunks,
                "ms": round(1e3 * statistics.median(slowest), 2),
                "x one chunk": round(statistics.median(a / b for a, b in zip(slowest, least, strict=True)), 3),
                "all-to-alls, ms": round(travels / 1e3 / sum(len(steps) for steps, *_ in traces[chunks]), 2),
                "overlapped %": round(100 * both / travels, 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    world = 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (world, folder, options.rounds), world)
        traces = {
            chunks: [read_trace(Path(folder, f"{chunks}-{rank}.json")) for rank in range(world)] for chunks in CHUNKS
        }
        seconds = [json.loads(Path(folder, f"seconds-{rank}.json").read_text()) for rank in range(world)]
    shown = {chunks: traces[chunks][0] for chunks in SHOWN}
    save_figure(ROOT / "docs" / "images" / "overlap.png", partial(draw, traces=shown))
    facts = {"processes": world, "tokens": TOKENS, "dim": DIM, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K}
    write_report("overlap", rows_of(traces, seconds), rounds=options.rounds, **facts)


if __name__ == "__main__":
    main()
