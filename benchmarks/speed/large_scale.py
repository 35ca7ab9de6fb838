"""Predicted steps of a mixture as large as DeepSeek-V3 on 64 to 4,096 GPUs: imbalance, replicas, placement by nodes.

    python benchmarks/speed/large_scale.py       four tables and docs/images/large_scale.png, two minutes
    python benchmarks/speed/large_scale.py worlds  64 to 4,096 GPUs in EP groups of 64
    python benchmarks/speed/large_scale.py groups  EP groups of 64 to 256 GPUs, and the picture
    python benchmarks/speed/large_scale.py plans  what a plan costs
    python benchmarks/speed/large_scale.py exchanges  tokens sent once to a node, beside a row for each assignment

Nothing here was measured on a GPU. `toolkit.lab.simulate` predicts; inputs are made-up loads and the rates in
`H800`, each with its source. 58 layers of 256 experts, top 8, hidden 7,168, expert width 2,048; 4,096 tokens on each
GPU and step, or 30,720 as in that model's training. Left out: pipelines, memory, exchanges that run beside computation,
and the averaging of gradients. The exchange is flat but in the fourth table.

Experts are popular by a lognormal law, anew in each layer; GPUs draw their tokens independently. With `subjects`, each
node of an EP group sees data of its own, with a lognormal factor more on each expert. Plans are made for the
popularity, so they are as good as any plan from the past can be. A step lasts until the slowest EP group is done.
Writes benchmarks/results/large_scale_<table>.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.experts.placement.loads import max_over_mean, shares
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.placement_options import ExpertExchange
from toolkit.experts.placement.planners import lpt, node_aware, replicate
from toolkit.experts.placement.traffic import expected_visits, migration_cost, rows_between_ranks
from toolkit.lab.simulate import Machine, simulate
from toolkit.run.pictures.plots import GREY, palette, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 58, 256, 8, 7168, 2048, 4096
"""DeepSeek-V3 (arXiv 2412.19437, section 4.2); tokens: one sequence of its length."""
TOKENS_OF_REPORT = 15_360 * 4096 // 2048
"""Of one GPU and step: batches of 15,360 sequences on 2,048 GPUs."""
ACTIVE_PARAMETERS = 37e9
"""Of the whole model, for one token (the same report)."""
EXPERT = 3 * HIDDEN * WIDTH
"""Parameters of one expert."""
FLOPS = 400e12
"""Assumed: reached on average, of 989e12 dense bfloat16 (NVIDIA's data sheet of the H100 SXM, whose compute the H800
has)."""
MEMORY = 3.35e12
"""Bytes per second (the same data sheet)."""
NODE, WORLDS = 8, (64, 256, 1024, 4096)
EP_SIZE = 64
"""As in DeepSeek-V3."""
EP_SIZES = (64, 128, 256)
TOKENS_OF_EXCHANGES = (128, TOKENS, TOKENS_OF_REPORT)
"""The first: a batch of generation."""
NODES_PER_TOKEN = (4, 2)
"""The first as in DeepSeek-V3: a router that chooses nodes, and then experts on these."""
WEIGHT_BYTES, OPTIMIZER_BYTES = 2 * EXPERT, 12 * EXPERT
"""bfloat16; float32 moments and master weights."""
ROW_BYTES = HIDDEN * (1 + 2)
"""Dispatch in FP8, combine in bfloat16, as DeepEP's README measures it."""
H800 = Machine(
    seconds_per_row=6 * EXPERT / FLOPS,
    # The weights are read in the forward and twice in the backward, and their gradient is written.
    seconds_per_slot=4 * WEIGHT_BYTES / MEMORY,
    seconds_per_row_sent=6 * 2 * HIDDEN / MEMORY,
    # NVLink 160 GB/s and InfiniBand 50 GB/s: section 3.2.2 of the report.
    bytes_per_second=50e9,
    ranks_per_node=NODE,
    node_bytes_per_second=160e9,
    # Assumed: 50 microseconds for an all-to-all without rows.
    exchange_seconds=50e-6,
    dense_seconds_per_token=6 * (ACTIVE_PARAMETERS - LAYERS * TOP_K * EXPERT) / FLOPS,
    top_k=TOP_K,
    # Gradient, master weight and two moments are read, the last three and the weight are written.
    optimizer_seconds_per_slot=(4 * 4 + 3 * 4 + 2) * EXPERT / MEMORY,
)
COST = H800.cost_model(row_bytes=ROW_BYTES, weight_bytes=WEIGHT_BYTES, optimizer_bytes=OPTIMIZER_BYTES)
LOADS = {"even": (0.0, 0.0), "skewed": (0.5, 0.0), "very skewed": (1.0, 0.0), "skewed, subjects": (0.5, 0.7)}
"""Standard deviations of the logarithm of popularity: over experts, and over the nodes of a group beside it."""

Floats = NDArray[np.float64]


def popularity(skew: float, subjects: float, ranks: int, seed: int = 0) -> Floats:
    """(L, S, E): the chance of each expert for an assignment of each rank of a group."""
    rng = np.random.default_rng(seed)
    logs = rng.normal(0, skew, (LAYERS, 1, EXPERTS)) + rng.normal(0, subjects, (LAYERS, ranks // NODE, EXPERTS))
    weights = np.exp(np.repeat(np.broadcast_to(logs, (LAYERS, ranks // NODE, EXPERTS)), NODE, axis=1))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def planners(popular_SE: Floats) -> dict[str, Callable[[], ExpertPlacement]]:
    ranks = len(popular_SE)
    blocks = contiguous(EXPERTS, ranks)
    nodes = [rank // NODE for rank in range(ranks)]
    load_E = popular_SE.sum(0)
    return {
        "blocks": lambda: blocks,
        "lpt": partial(lpt, load_E, blocks),
        "node_aware": partial(node_aware, load_E, blocks, node_of_rank=nodes, source_load_RE=popular_SE),
        "replicate": partial(replicate, load_E, with_spare_slots(blocks, 1)),
    }


def worlds() -> list[dict[str, Any]]:
    """A row per load, placement and number of GPUs. All placements see the same tokens."""
    rows = []
    for label, (skew, subjects) in LOADS.items():
        popular_LSE = popularity(skew, subjects, EP_SIZE)
        plans = [{name: plan() for name, plan in planners(each).items()} for each in popular_LSE]
        rng = np.random.default_rng(1)
        totals: dict[str, list[float]] = {name: [] for name in plans[0]}
        parts: dict[str, dict[str, float]] = {}
        for _ in range(max(WORLDS) // EP_SIZE):
            load_LSE = rng.multinomial(TOKENS * TOP_K, popular_LSE)
            for name, each in totals.items():
                found = simulate(load_LSE[None], [plan[name] for plan in plans], [COST] * LAYERS, H800)
                each.append(float(found.total_T[0]))
                parts.setdefault(name, {key.removesuffix("_T"): float(part[0]) for key, part in vars(found).items()})
        for world in WORLDS:
            for name, each in totals.items():
                slowest = max(each[: world // EP_SIZE])
                rows.append(
                    {
                        "load": label,
                        "GPUs": world,
                        "placement": name,
                        "step s": round(slowest, 3),
                        "x blocks": round(slowest / max(totals["blocks"][: world // EP_SIZE]), 3),
                        **{f"{part} s": round(value, 3) for part, value in parts[name].items()},
                    }
                )
    return rows


def groups() -> list[dict[str, Any]]:
    """A row per size of an EP group, load, tokens and placement; one group."""
    rows = []
    for ep_size in EP_SIZES:
        for tokens in (TOKENS, TOKENS_OF_REPORT):
            even = 0.0
            for label, (skew, subjects) in LOADS.items():
                popular_LSE = popularity(skew, subjects, ep_size)
                load_LSE = np.random.default_rng(1).multinomial(tokens * TOP_K, popular_LSE)
                plans = [{name: plan() for name, plan in planners(each).items()} for each in popular_LSE]
                for name in plans[0]:
                    placements = [plan[name] for plan in plans]
                    found = simulate(load_LSE[None], placements, [COST] * LAYERS, H800)
                    total = float(found.total_T[0])
                    even = even or total
                    by_rank = [load.sum(0) @ shares(each) for load, each in zip(load_LSE, placements, strict=True)]
                    rows.append(
                        {
                            "EP size": ep_size,
                            "tokens": tokens,
                            "load": label,
                            "placement": name,
                            "imbalance": round(float(np.mean(max_over_mean(np.array(by_rank)))), 3),
                            "step s": round(total, 2),
                            "x even": round(total / even, 3),
                            "experts s": round(float(found.experts_T[0]), 2),
                            "exchanges s": round(float(found.exchanges_T[0]), 2),
                            "replicas s": round(float(found.replicas_T[0]), 2),
                        }
                    )
    return rows


def plans() -> list[dict[str, Any]]:
    """What one plan of all layers costs, and after how many steps it has paid, for EP groups of 64 and more GPUs."""
    rows = []
    for ep_size in EP_SIZES:
        popular_LSE = popularity(0.5, 0.0, ep_size)
        load_LSE = np.random.default_rng(1).multinomial(TOKENS_OF_REPORT * TOP_K, popular_LSE)
        blocks = contiguous(EXPERTS, ep_size)
        spared = with_spare_slots(blocks, 1)
        before = float(simulate(load_LSE[None], [blocks] * LAYERS, [COST] * LAYERS, H800).total_T[0])
        for name in ("lpt", "replicate"):
            began = time.process_time()
            found = [planners(each)[name]() for each in popular_LSE]
            planning = time.process_time() - began
            start = spared if name == "replicate" else blocks
            costs = [
                migration_cost(start, plan, weight_bytes=WEIGHT_BYTES, optimizer_bytes=OPTIMIZER_BYTES)
                for plan in found
            ]
            moving = sum(COST.migration_seconds(start, plan) for plan in found)
            saved = before - float(simulate(load_LSE[None], found, [COST] * LAYERS, H800).total_T[0])
            rows.append(
                {
                    "EP size": ep_size,
                    "planner": name,
                    "planning s": round(planning, 2),
                    "moved GB": round(sum(cost.bytes for cost in costs) / 1e9),
                    "moving s": round(moving, 1),
                    "step s before": round(before, 2),
                    "saved s per step": round(saved, 2),
                    "steps to pay": round((planning + moving) / saved, 1) if saved > 0 else None,
                }
            )
    return rows


def exchanges() -> list[dict[str, Any]]:
    """A row per size of an EP group, tokens, and nodes on which a token's experts may be: seconds of all exchanges of a
    step and of the order of their rows, with contiguous experts and an even load, flat and hierarchical."""
    rows = []
    for ep_size in EP_SIZES:
        blocks = contiguous(EXPERTS, ep_size)
        for tokens in TOKENS_OF_EXCHANGES:
            load_SE = np.full((ep_size, EXPERTS), tokens * TOP_K / EXPERTS)
            between_SR = rows_between_ranks(load_SE, blocks)
            for limit in (None, *NODES_PER_TOKEN):
                flat, hierarchical = (
                    replace(COST, exchange=name, nodes_per_token=limit) for name in get_args(ExpertExchange)
                )
                found = [each.layer_seconds(load_SE, blocks) for each in (flat, hierarchical)]
                first, second = (float(each.router + each.exchanges) for each in found)
                visits = expected_visits(between_SR, ep_size // NODE, top_k=TOP_K, slots=EXPERTS, nodes_per_token=limit)
                rows.append(
                    {
                        "EP size": ep_size,
                        "tokens": tokens,
                        "nodes of a token": limit or "any",
                        "rows between nodes, flat": round(TOP_K * (1 - NODE / ep_size), 2),
                        "rows between nodes, hierarchical": round(float(visits[0, 1:].sum()) / tokens, 2),
                        "flat s": round(LAYERS * first, 3),
                        "hierarchical s": round(LAYERS * second, 3),
                        "x flat": round(second / first, 3),
                    }
                )
    return rows


def draw(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    """Time of a step over that with an even load, by the size of an EP group; a panel for each load."""
    names = list(dict.fromkeys(row["placement"] for row in rows))
    colours = dict(zip(names, [GREY, *palette(len(names) - 1)], strict=True))
    figure.set_size_inches(12, 3.6)
    panels = figure.subplots(1, len(LOADS), sharey=True)
    for axes, label in zip(panels, LOADS, strict=True):
        for place, name in enumerate(names):
            line = [row for row in rows if (row["load"], row["placement"]) == (label, name)]
            line = [row for row in line if row["tokens"] == TOKENS_OF_REPORT]
            # Broad lines below narrow ones, because planners that do the same draw the same line.
            width = 1.4 + 1.4 * (len(names) - 1 - place)
            sizes = [row["EP size"] for row in line]
            axes.plot(sizes, [row["x even"] for row in line], color=colours[name], lw=width, marker="o", ms=4)
        axes.set_title(label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(EP_SIZES, [str(size) for size in EP_SIZES])
        axes.set_xlabel("GPUs of an EP group")
        axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    panels[0].set_ylim(bottom=0.9)
    panels[0].set_ylabel("predicted step / with even load")
    figure.legend(panels[0].get_lines(), names, loc="outside lower center", ncols=len(names))


TABLES = {"worlds": worlds, "groups": groups, "plans": plans, "exchanges": exchanges}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=TABLES, help="default: all")
    chosen = parser.parse_args().table
    rates = {key: value for key, value in asdict(H800).items() if value is not None}
    for name in [chosen] if chosen else TABLES:
        rows = TABLES[name]()
        write_report(f"large_scale_{name}", rows, rates=json.dumps(rates), sigmas=json.dumps(LOADS))
        if name == "groups":
            save_figure(ROOT / "docs" / "images" / "large_scale.png", partial(draw, rows=rows))


if __name__ == "__main__":
    main()
