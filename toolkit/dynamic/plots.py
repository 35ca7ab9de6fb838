"""Pictures of dynamic experts, drawn from lifecycle.jsonl and metrics.jsonl when a run ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.dynamic.knowledge_graph_plot import draw_knowledge_graph, positions_on_circle
from toolkit.dynamic.performance import performance_summary
from toolkit.dynamic.records import Epoch, LayerState, read_lifecycle
from toolkit.run.folder import write_text
from toolkit.run.pictures.plots import (
    GREY,
    INK,
    TRAIN,
    Experts,
    draw_experts,
    draw_loss,
    ink_on,
    palette,
    save_figure,
    spread,
)
from toolkit.run.summary import moves
from toolkit.run.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LAYERS = 4
"""Layers in a picture; of a deeper model evenly spaced ones are shown."""
MOST_GRAPHS = 60
"""Pictures of the knowledge graph; of a longer run evenly spaced epochs are drawn."""
MOST_LOGGED = 8
"""Pictures of the knowledge graph that go to trackers."""
GRAPH = "knowledge_graph_epoch_"
MOST_LABELS = 14
"""Numbers are written into up to so many bars, or rows and columns."""
SPLIT, MERGE, SLEEP = "#3ca951", "#ff725c", "#a463f2"


def draw_dynamic_run(folder: Path, results: Mapping[str, Any]) -> dict[str, Path]:
    """Draw the finished run in `folder` and write its performance_summary.txt; return the plots for trackers.

    The plots of the load, placement and moves of experts are drawn again with uids, because new experts get the logical
    ids of removed experts.
    """
    last = read_lifecycle(folder)[-1].layers
    lines = list(read_metrics(folder / "metrics.jsonl"))
    logical = Experts.of(lines, results)
    first = results.get("first_move_step", 0)
    experts = Experts(
        loads={
            name: [(step, last[name].by_uid(shares, step)) for step, shares in points] if name in last else points
            for name, points in logical.loads.items()
        },
        placement={n: [[uid for uid in row if uid is not None] for row in last[n].uids_on_ranks] for n in last},
        before={n: last[n].rows_by_uid(rows, first) for n, rows in logical.before.items() if n in last},
        moves={n: [(s, last[n].rows_by_uid(v, s + 1)) for s, v in logical.moves.get(n, [])] for n in last},
    )
    pictures = draw_experts(folder, experts, lines, moves(results)) | draw_lifecycle(folder)
    write_text(folder / "performance_summary.txt", performance_summary(folder))
    return for_trackers(pictures)


def draw_lifecycle(folder: Path) -> dict[str, Path]:
    """Draw the pictures of the lifecycle of the run in `folder`; return their files by name. Without changes: none."""
    epochs = read_lifecycle(folder)
    if not any(event["kind"] in ("grow", "merge", "prune") for epoch in epochs for event in epoch.events):
        return {}
    layers = spread(list(epochs[-1].layers), MOST_LAYERS)
    positions = {layer: positions_on_circle([epoch.layers[layer] for epoch in epochs]) for layer in layers}
    drawings: dict[str, Callable[[Figure], None]] = {
        "training_metrics": lambda figure: _draw_training(figure, folder, epochs),
        "expert_activations": lambda figure: _draw_activations(figure, epochs, layers),
        "expert_device_distribution": lambda figure: _draw_devices(figure, epochs, layers),
    }
    for epoch in spread(epochs, MOST_GRAPHS):
        drawings[f"{GRAPH}{math.ceil(epoch.number):03d}"] = partial(
            draw_knowledge_graph, epoch=epoch, positions=positions
        )
    return {name: save_figure(folder / f"{name}.png", draw) for name, draw in drawings.items()}


def for_trackers(pictures: Mapping[str, Path]) -> dict[str, Path]:
    """`pictures` with at most `MOST_LOGGED` knowledge graphs, the first and the last included."""
    kept = spread([name for name in pictures if name.startswith(GRAPH)], MOST_LOGGED)
    return {name: path for name, path in pictures.items() if not name.startswith(GRAPH) or name in kept}


def _draw_training(figure: Figure, folder: Path, epochs: Sequence[Epoch]) -> None:
    """Loss and accuracy over steps with the lifecycle events, and the time of each epoch."""
    figure.set_size_inches(14, 4)
    curves, times = figure.subfigures(1, 2, squeeze=False, width_ratios=[2.4, 1])[0]
    draw_loss(curves, list(read_metrics(folder / "metrics.jsonl")))
    kinds = {"sleep": ("sleep", SLEEP), "grow": ("split", SPLIT), "merge": ("merge", MERGE)}
    for panel, axes in enumerate(curves.axes):
        for kind, (name, colour) in kinds.items():
            style: Any = {"lw": 4, "alpha": 0.25} if kind == "sleep" else {"lw": 1.2, "ls": (0, (1, 2))}
            steps = sorted({event["step"] for epoch in epochs for event in epoch.events if event["kind"] == kind})
            for i, step in enumerate(steps):
                label = name if i == panel == 0 else None
                axes.axvline(step, color=colour, zorder=0, label=label, **style)
        axes.legend(loc="best")
    axes = times.subplots()
    bars = axes.bar([epoch.number for epoch in epochs], [epoch.seconds for epoch in epochs], 0.8, color=TRAIN)
    for bar, epoch in zip(bars, epochs, strict=True):
        if epoch.number % 1:
            bar.set_alpha(0.4)
    if len(epochs) <= MOST_LABELS:
        axes.bar_label(bars, fmt="{:.3g}", fontsize=8, color=INK, padding=2)
    axes.set_title("Epoch time, s (without evaluation)")
    _epoch_axis(axes)


def _draw_activations(figure: Figure, epochs: Sequence[Epoch], layers: Sequence[str]) -> None:
    """The load of each expert in each epoch, and its tokens by class in the last one."""
    last = epochs[-1]
    tallest = max(len(last.layers[layer].active) for layer in layers)
    figure.set_size_inches(13, max(4.0, 1.5 + 0.26 * tallest) * len(layers))
    colours = palette(1 + max(uid for state in last.layers.values() for uid in state.nodes))
    for layer, (shares, classes) in zip(layers, figure.subplots(len(layers), 2, squeeze=False), strict=True):
        states = [epoch.layers[layer] for epoch in epochs]
        uids = sorted({uid for state in states for uid, node in state.nodes.items() if node["share"] > 0})
        base = [0.0] * len(epochs)
        for uid in uids:
            heights = [100 * state.nodes[uid]["share"] if uid in state.nodes else 0.0 for state in states]
            bars = shares.bar(
                [epoch.number for epoch in epochs], heights, 0.86, base, color=colours[uid], edgecolor="white", lw=0.6
            )
            if len(epochs) <= MOST_LABELS:
                labels = [str(uid) if height >= 4 else "" for height in heights]
                shares.bar_label(bars, labels, label_type="center", fontsize=8, color=ink_on(colours[uid]))
            base = [b + h for b, h in zip(base, heights, strict=True)]
        shares.set_title(_title("Load per expert, % of assignments", layer, layers))
        shares.set_ylim(0, 100)
        _epoch_axis(shares)
        _draw_classes(
            figure,
            classes,
            last.layers[layer],
            _title(f"Tokens of each expert by class, epoch {last.name}, %", layer, layers),
        )


def _draw_classes(figure: Figure, axes: Axes, state: LayerState, title: str) -> None:
    seen = [uid for uid in state.active if state.nodes[uid]["classes"]]
    axes.set_title(title)
    if not seen:
        axes.text(0.5, 0.5, "no classes were recorded", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    grid = [[100 * fraction for fraction in state.nodes[uid]["classes"]] for uid in seen]
    # The scale reaches at least four times the mean, so that small differences look small.
    peak = max(*map(max, grid), min(100, 400 / len(grid[0])))
    image = axes.imshow(grid, cmap="Blues", aspect="auto", vmin=0, vmax=peak)
    if max(len(grid), len(grid[0])) <= MOST_LABELS:
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                ink = "white" if value > 0.6 * peak else INK
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks(range(len(grid[0]))) if len(grid[0]) <= 2 * MOST_LABELS else None
    axes.set_yticks(range(len(seen)), [f"{uid} ({100 * state.nodes[uid]['share']:.0f} %)" for uid in seen])
    axes.set_ylabel("expert (share of load)")
    axes.set_xlabel("class")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, pad=0.02)


def _draw_devices(figure: Figure, epochs: Sequence[Epoch], layers: Sequence[str]) -> None:
    """The number of experts on each rank in each epoch, and the placement at the end."""
    from matplotlib.ticker import MaxNLocator

    last = epochs[-1]
    ranks = max(len(last.layers[layer].logical_on_ranks) for layer in layers)
    figure.set_size_inches(13, max(3.2, 1.6 + 0.5 * ranks) * len(layers) + 0.5)
    if last.world_size == 1:
        where = f"One process ({last.device})"
    else:
        groups = last.world_size // ranks
        where = f"{last.world_size} processes ({last.device})" + (
            f": {groups} EP groups of {ranks} with the same experts" if groups > 1 else ""
        )
    figure.suptitle(where, x=0.01, ha="left", color=INK)
    grid = figure.subplots(len(layers), 2, squeeze=False, width_ratios=[1, 1.3])
    for layer, (counts, placement) in zip(layers, grid, strict=True):
        states = [epoch.layers[layer] for epoch in epochs]
        width = 0.86 / ranks
        for rank, colour in zip(range(ranks), palette(ranks), strict=True):
            held = [sum(uid is not None for uid in state.uids_on_ranks[rank]) for state in states]
            at = [epoch.number + (rank - (ranks - 1) / 2) * width for epoch in epochs]
            bars = counts.bar(at, held, width, color=colour, edgecolor="white", lw=0.6, label=f"rank {rank}")
            if len(epochs) * ranks <= 2 * MOST_LABELS:
                counts.bar_label(bars, fontsize=8, color=INK)
        counts.set_title(_title("Active experts per rank", layer, layers))
        _epoch_axis(counts)
        counts.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        if 1 < ranks <= MOST_LABELS:
            counts.set_ylim(top=1.25 * counts.get_ylim()[1])
            counts.legend(loc="upper left", ncols=7, fontsize=8)
        _draw_placement(placement, states[-1], _title(f"Placement, epoch {last.name}", layer, layers))


def _draw_placement(axes: Axes, state: LayerState, title: str) -> None:
    """A row of boxes per rank with the experts' uids; slots without an active expert are empty boxes."""
    rows = state.uids_on_ranks
    widest = max(map(len, rows))
    for (rank, uids), colour in zip(enumerate(rows), palette(len(rows)), strict=True):
        for slot, uid in enumerate(uids):
            if uid is None:
                axes.barh(rank, 0.9, left=slot, height=0.8, color="none", edgecolor=GREY, ls=":")
                continue
            share = state.nodes[uid]["share"]
            axes.barh(rank, 0.9, left=slot, height=0.8, color=colour)
            if widest <= 2 * MOST_LABELS:
                text = f"{uid}\n{100 * share:.0f} %" if widest <= MOST_LABELS else str(uid)
                axes.text(slot + 0.45, rank, text, ha="center", va="center", fontsize=8, color=ink_on(colour))
    axes.set_title(title + ("  (dotted: inactive)" if any(None in uids for uids in rows) else ""))
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.set_xticks([])
    axes.set_xlim(0, max(widest, 6))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)


def _title(text: str, layer: str, layers: Sequence[str]) -> str:
    return f"{text}: {layer}" if layer and len(layers) > 1 else text


def _epoch_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    axes.set_axisbelow(True)
