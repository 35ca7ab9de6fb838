"""Pictures of a population, drawn from lifecycle.jsonl and metrics.jsonl when a run ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.pictures.knowledge_graph_plot import draw_knowledge_graph, places_on_circle
from toolkit.pictures.plots import GREY, INK, TRAIN, draw_loss, palette, save_figure, spread, step_axis
from toolkit.tracking.jsonl import read_metrics
from toolkit.tracking.lifecycle_records import Epoch, LayerState, read_lifecycle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LAYERS = 4
"""Rows of a picture; of a deeper model the layers shown are spread evenly."""
MOST_GRAPHS = 60
"""Pictures of the knowledge graph; of a longer run the epochs drawn are spread evenly."""
MOST_LOGGED = 8
"""Of these the ones that go to trackers."""
GRAPH = "knowledge_graph_epoch_"
MOST_LABELS = 14
"""Bars, or rows and columns, up to which numbers are written into them."""
BIRTH, MERGER, SLEEP = "#3ca951", "#ff725c", "#a463f2"


def draw_lifecycle(folder: Path) -> dict[str, Path]:
    """Draw what lifecycle.jsonl of the run in `folder` tells; returns picture files by name, none without the file."""
    epochs = read_lifecycle(folder)
    if not epochs:
        return {}
    layers = spread(list(epochs[-1].layers), MOST_LAYERS)
    places = {layer: places_on_circle([epoch.layers[layer] for epoch in epochs]) for layer in layers}
    drawings: dict[str, Callable[[Figure], None]] = {
        "training_metrics": lambda figure: _draw_training(figure, folder, epochs),
        "expert_activations": lambda figure: _draw_activations(figure, epochs, layers),
        "expert_device_distribution": lambda figure: _draw_devices(figure, epochs, layers),
        "lifecycle_timeline": lambda figure: _draw_timeline(figure, epochs, layers),
    }
    for epoch in spread(epochs, MOST_GRAPHS):
        drawings[f"{GRAPH}{math.ceil(epoch.number):03d}"] = partial(draw_knowledge_graph, epoch=epoch, places=places)
    return {name: save_figure(folder / f"{name}.png", draw) for name, draw in drawings.items()}


def for_trackers(pictures: Mapping[str, Path]) -> dict[str, Path]:
    """`pictures`, with at most `MOST_LOGGED` of the knowledge graphs, first and last among them."""
    graphs = [name for name in pictures if name.startswith(GRAPH)]
    kept = spread(graphs, MOST_LOGGED)
    return {name: path for name, path in pictures.items() if name not in graphs or name in kept}


def _draw_training(figure: Figure, folder: Path, epochs: Sequence[Epoch]) -> None:
    """Loss and accuracy over steps, with what happened to the population, and the time of each epoch."""
    figure.set_size_inches(14, 4)
    curves, times = figure.subfigures(1, 2, squeeze=False, width_ratios=[2.4, 1])[0]
    draw_loss(curves, list(read_metrics(folder / "metrics.jsonl")))
    kinds = {"sleep": ("sleep", SLEEP), "grow": ("birth", BIRTH), "merge": ("merger", MERGER)}
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
    axes.set_title("Epoch time, s (training alone)")
    _epoch_axis(axes)


def _draw_activations(figure: Figure, epochs: Sequence[Epoch], layers: Sequence[str]) -> None:
    """Which share of the routed copies each expert had in each epoch, and which classes it saw in the last one."""
    last = epochs[-1]
    tallest = max(len(last.layers[layer].active) for layer in layers)
    figure.set_size_inches(13, max(4.0, 1.5 + 0.26 * tallest) * len(layers))
    for layer, (shares, classes) in zip(layers, figure.subplots(len(layers), 2, squeeze=False), strict=True):
        states = [epoch.layers[layer] for epoch in epochs]
        ids = sorted({id for state in states for id, node in state.nodes.items() if node["share"] > 0})
        colour_of = dict(zip(ids, palette(len(ids)), strict=True))
        base = [0.0] * len(epochs)
        for id in ids:
            heights = [100 * _share(state, id) for state in states]
            bars = shares.bar(
                [epoch.number for epoch in epochs], heights, 0.86, base, color=colour_of[id], edgecolor="white", lw=0.6
            )
            if len(epochs) <= MOST_LABELS:
                labels = [str(id) if height >= 4 else "" for height in heights]
                shares.bar_label(bars, labels, label_type="center", fontsize=8, color=ink_on(colour_of[id]))
            base = [b + h for b, h in zip(base, heights, strict=True)]
        shares.set_title(_title("Routed copies per expert, %", layer, layers))
        shares.set_ylim(0, 100)
        _epoch_axis(shares)
        _draw_classes(
            figure, classes, last.layers[layer], _title(f"What each expert saw, epoch {last.name}, %", layer, layers)
        )


def _draw_classes(figure: Figure, axes: Axes, state: LayerState, title: str) -> None:
    seen = [id for id in state.active if state.nodes[id]["classes"]]
    axes.set_title(title)
    if not seen:
        axes.text(0.5, 0.5, "no classes were recorded", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    grid = [[100 * fraction for fraction in state.nodes[id]["classes"]] for id in seen]
    # Four times an even share at least, so that little differences look little.
    peak = max(*map(max, grid), min(100, 400 / len(grid[0])))
    image = axes.imshow(grid, cmap="Blues", aspect="auto", vmin=0, vmax=peak)
    if max(len(grid), len(grid[0])) <= MOST_LABELS:
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                ink = "white" if value > 0.6 * peak else INK
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks(range(len(grid[0]))) if len(grid[0]) <= 2 * MOST_LABELS else None
    axes.set_yticks(range(len(seen)), [f"{id} ({100 * state.nodes[id]['share']:.0f} %)" for id in seen])
    axes.set_ylabel("expert (share of copies)")
    axes.set_xlabel("class")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, pad=0.02)


def _draw_devices(figure: Figure, epochs: Sequence[Epoch], layers: Sequence[str]) -> None:
    """How many experts each process had, epoch by epoch, and where each one lives at the end."""
    from matplotlib.ticker import MaxNLocator

    last = epochs[-1]
    ranks = max(len(last.layers[layer].logical_on_ranks) for layer in layers)
    figure.set_size_inches(13, max(3.2, 1.6 + 0.5 * ranks) * len(layers) + 0.5)
    if last.world_size == 1:
        where = f"One process ({last.device}): all experts live on rank 0"
    else:
        groups = last.world_size // ranks
        where = f"{last.world_size} processes ({last.device})" + (
            f": {groups} sets of {ranks}, which hold the same experts" if groups > 1 else ""
        )
    figure.suptitle(where, x=0.01, ha="left", color=INK)
    grid = figure.subplots(len(layers), 2, squeeze=False, width_ratios=[1, 1.3])
    for layer, (counts, places) in zip(layers, grid, strict=True):
        states = [epoch.layers[layer] for epoch in epochs]
        width = 0.86 / ranks
        for rank, colour in zip(range(ranks), palette(ranks), strict=True):
            held = [sum(id is not None for id in state.ids_on_ranks[rank]) for state in states]
            at = [epoch.number + (rank - (ranks - 1) / 2) * width for epoch in epochs]
            bars = counts.bar(at, held, width, color=colour, edgecolor="white", lw=0.6, label=f"rank {rank}")
            if len(epochs) * ranks <= 2 * MOST_LABELS:
                counts.bar_label(bars, fontsize=8, color=INK)
        counts.set_title(_title("Experts per process", layer, layers))
        _epoch_axis(counts)
        counts.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        if 1 < ranks <= MOST_LABELS:
            counts.set_ylim(top=1.25 * counts.get_ylim()[1])
            counts.legend(loc="upper left", ncols=7, fontsize=8)
        _draw_logical_experts(places, states[-1], _title(f"Where each lives, epoch {last.name}", layer, layers))


def _draw_logical_experts(axes: Axes, state: LayerState, title: str) -> None:
    """A row of boxes per rank: the experts' ids, in the colour of the rank; vacant seats are empty boxes."""
    rows = state.ids_on_ranks
    widest = max(map(len, rows))
    for (rank, ids), colour in zip(enumerate(rows), palette(len(rows)), strict=True):
        for slot, id in enumerate(ids):
            if id is None:
                axes.barh(rank, 0.9, left=slot, height=0.8, color="none", edgecolor=GREY, ls=":")
                continue
            share = state.nodes[id]["share"]
            axes.barh(rank, 0.9, left=slot, height=0.8, color=colour)
            if widest <= 2 * MOST_LABELS:
                text = f"{id}\n{100 * share:.0f} %" if widest <= MOST_LABELS else str(id)
                axes.text(slot + 0.45, rank, text, ha="center", va="center", fontsize=8, color=ink_on(colour))
    axes.set_title(title + ("  (dotted: vacant)" if any(None in ids for ids in rows) else ""))
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.set_xticks([])
    axes.set_xlim(0, max(widest, 6))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)


def _draw_timeline(figure: Figure, epochs: Sequence[Epoch], layers: Sequence[str]) -> None:
    """The life of each expert as a bar over steps, with births, mergers, ends and sleeps."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    last = epochs[-1]
    most = max(len(last.layers[layer].nodes) for layer in layers)
    figure.set_size_inches(13, (2.6 + min(11.0, 0.24 * most)) * len(layers))
    grid = figure.subplots(
        2 * len(layers), 1, squeeze=False, height_ratios=[1, max(1.5, min(8.0, 0.2 * most))] * len(layers)
    )[:, 0]
    for index, layer in enumerate(layers):
        count, lives = grid[2 * index], grid[2 * index + 1]
        nodes = last.layers[layer].nodes
        ends = {id: last.step if node["removed_at"] is None else node["removed_at"] for id, node in nodes.items()}
        steps = sorted({0, last.step, *(node["created_at"] for node in nodes.values()), *ends.values()})
        active = [
            sum(n["created_at"] <= step and (n["removed_at"] is None or step < n["removed_at"]) for n in nodes.values())
            for step in steps
        ]
        count.step(steps, active, where="post", color=INK, lw=1.6)
        count.fill_between(steps, active, step="post", color=TRAIN, alpha=0.15, lw=0)
        count.set_ylim(0, max(active) + 1)
        count.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        count.set_title(_title("Living experts", layer, layers))
        rows = {id: row for row, id in enumerate(sorted(nodes))}
        for id, node in nodes.items():
            lives.barh(
                rows[id],
                ends[id] - node["created_at"],
                left=node["created_at"],
                height=0.62,
                color=TRAIN if node["active"] else GREY,
            )
            if node["parent"] is not None:
                _arrow(lives, node["created_at"], rows[node["parent"]], rows[id], BIRTH)
            if node["merged_into"] is not None:
                _arrow(lives, ends[id], rows[id], rows[node["merged_into"]], MERGER)
            elif not node["active"]:
                lives.plot(ends[id], rows[id], marker="x", color=INK, ms=7, mew=2)
        for event in (event for epoch in epochs for event in epoch.events_of(layer)):
            if event["kind"] in ("sleep", "undone"):
                for axes in (count, lives):
                    axes.axvline(
                        event["step"], color=SLEEP, lw=1.2, ls="-" if event["kind"] == "sleep" else ":", zorder=0
                    )
        lives.set_title("Lives")
        lives.set_ylabel("expert")
        if len(rows) <= 60:
            lives.set_yticks(list(rows.values()), [str(id) for id in rows], fontsize=8 if len(rows) <= 30 else 6)
        lives.set_ylim(len(rows) - 0.4, -0.6)
        for axes in (count, lives):
            step_axis(axes)
            axes.set_xlim(0, last.step)
            axes.set_axisbelow(True)
        count.set_xlabel("")
    handles = [
        Line2D([], [], color=TRAIN, lw=6, label="lives"),
        Line2D([], [], color=GREY, lw=6, label="ended"),
        Line2D([], [], color=BIRTH, lw=1.6, marker="v", ms=6, label="split from"),
        Line2D([], [], color=MERGER, lw=1.6, marker="v", ms=6, label="merged into"),
        Line2D([], [], color=INK, lw=0, marker="x", ms=7, mew=2, label="pruned"),
        Line2D([], [], color=SLEEP, lw=1.2, label="sleep"),
        Line2D([], [], color=SLEEP, lw=1.2, ls=":", label="undone"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _arrow(axes: Axes, step: float, start: int, end: int, colour: str) -> None:
    axes.annotate(
        "",
        (step, end),
        (step, start),
        arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0},
        annotation_clip=False,
    )


def _share(state: LayerState, id: int) -> float:
    node = state.nodes.get(id)
    return node["share"] if node is not None else 0.0


def _title(text: str, layer: str, layers: Sequence[str]) -> str:
    return f"{text}: {layer}" if layer and len(layers) > 1 else text


def _epoch_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    axes.set_axisbelow(True)


def ink_on(colour: Mapping[int, float] | Sequence[float]) -> str:
    """What can be read on `colour`."""
    return "white" if 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] < 0.6 else INK
