"""Plots of dynamic experts, drawn from lifecycle.jsonl and metrics.jsonl when a run ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.dynamic.knowledge_graph_plot import draw_knowledge_graph
from toolkit.dynamic.performance import performance_summary
from toolkit.dynamic.records import Epoch, LayerState, read_lifecycle
from toolkit.run.folder import write_text
from toolkit.run.pictures.plots import (
    EVAL,
    TRAIN,
    VALIDATION,
    Experts,
    Loads,
    draw_experts,
    draw_load,
    draw_loss,
    draw_placements,
    mark_steps,
    save_figure,
    short_names,
    spread,
    step_axis,
)
from toolkit.run.summary import moves
from toolkit.run.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LAYERS = 4
"""Layers in a plot; of a deeper model evenly spaced ones are shown."""
MOST_TIMES = 3
"""Epochs in the plot of the placement."""
EVENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sleep": ("sleep", {"color": "#a463f2", "lw": 5, "ls": "-", "alpha": 0.25}),
    "grow": ("split", {"color": VALIDATION}),
    "merge": ("merge", {"color": EVAL}),
}
"""Label and style of the events in the plot of the loss."""


def draw_dynamic_run(folder: Path, results: Mapping[str, Any]) -> dict[str, Path]:
    """Draw the finished run in `folder` and write its performance_summary.txt; return the plots for trackers.

    Experts have their uids, because new experts get the logical ids of removed experts.
    """
    epochs = read_lifecycle(folder)
    last = epochs[-1].layers
    lines = list(read_metrics(folder / "metrics.jsonl"))
    experts = experts_by_uid(Experts.of(lines, results), last, results.get("first_move_step", 0))
    layers = spread(list(last), MOST_LAYERS)
    loads = {layer: experts.loads.get(layer, []) for layer in layers}
    times = {
        f"After epoch {epoch.name}": {layer: epoch.layers[layer].uids_on_ranks for layer in layers}
        for epoch in spread(epochs, MOST_TIMES)
    }
    drawings: dict[str, Callable[[Figure], None]] = {
        "training_metrics": partial(_draw_training, lines=lines, epochs=epochs),
        "expert_activations": partial(_draw_activations, loads=loads, states=last),
    }
    if any(len(rows) > 1 for rows in experts.placement.values()):
        drawings["expert_device_distribution"] = partial(draw_placements, times=times)
    drawings[f"knowledge_graph_epoch_{math.ceil(epochs[-1].number):03d}"] = partial(
        draw_knowledge_graph, epochs=epochs, layers=layers
    )
    moved = replace(experts, loads={}, placement={})
    pictures = draw_experts(folder, moved, lines, moves(results))
    pictures |= {name: save_figure(folder / f"{name}.png", draw) for name, draw in drawings.items()}
    write_text(folder / "performance_summary.txt", performance_summary(folder))
    return pictures


def experts_by_uid(logical: Experts, states: Mapping[str, LayerState], first_move: int) -> Experts:
    """Return `logical` with the uids of dynamic experts, given the last state of each layer."""
    return Experts(
        loads={
            layer: [(step, states[layer].by_uid(shares, step)) for step, shares in points]
            for layer, points in logical.loads.items()
            if layer in states
        },
        placement={layer: state.uids_on_ranks for layer, state in states.items()},
        before={
            layer: states[layer].rows_by_uid(rows, first_move)
            for layer, rows in logical.before.items()
            if layer in states
        },
        moves={
            layer: [(step, states[layer].rows_by_uid(rows, step + 1)) for step, rows in points]
            for layer, points in logical.moves.items()
            if layer in states
        },
    )


def _draw_training(figure: Figure, *, lines: Sequence[Mapping[str, Any]], epochs: Sequence[Epoch]) -> None:
    """Draw loss and accuracy over steps with the lifecycle events, and the time of each epoch."""
    figure.set_size_inches(14, 4)
    curves, times = figure.subfigures(1, 2, squeeze=False, width_ratios=[2.4, 1])[0]
    draw_loss(curves, lines)
    for axes in curves.axes:
        for kind, (label, style) in EVENTS.items():
            steps = {event["step"] for epoch in epochs for event in epoch.events if event["kind"] == kind}
            mark_steps(axes, sorted(steps), label, **style)
        axes.legend(loc="best")
    axes = times.subplots()
    axes.bar([epoch.number for epoch in epochs], [epoch.seconds for epoch in epochs], color=TRAIN)
    axes.set_title("Epoch time, s (without evaluation)")
    step_axis(axes, "epoch")


def _draw_activations(figure: Figure, *, loads: Loads, states: Mapping[str, LayerState]) -> None:
    """Draw the load of each expert over steps, and its tokens by class in the last epoch."""
    tallest = max(len(states[layer].active) for layer in loads)
    names = short_names(list(loads))
    figure.set_size_inches(14, max(4.0, 1.5 + 0.26 * tallest) * len(loads))
    for (layer, points), (load, classes) in zip(
        loads.items(), figure.subplots(len(loads), 2, squeeze=False), strict=True
    ):
        draw_load(load, points, states[layer].uids_on_ranks, name=names[layer])
        _draw_classes(classes, states[layer])


def _draw_classes(axes: Axes, state: LayerState) -> None:
    seen = [uid for uid in state.active if state.nodes[uid]["classes"]]
    axes.set_title("Classes of the tokens of each expert, last epoch" if seen else "No classes were recorded")
    if not seen:
        return
    grid = [[100 * fraction for fraction in state.nodes[uid]["classes"]] for uid in seen]
    # The scale reaches at least four times the mean, so that small differences look small.
    peak = max(*map(max, grid), min(100, 400 / len(grid[0])))
    image = axes.imshow(grid, cmap="Blues", aspect="auto", vmin=0, vmax=peak)
    axes.set_yticks(range(len(seen)), [f"{uid} ({100 * state.nodes[uid]['share']:.0f} %)" for uid in seen])
    axes.set_ylabel("expert (share of load)")
    axes.set_xlabel("class")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.figure.colorbar(image, ax=axes, pad=0.02, label="% of the expert's tokens")
