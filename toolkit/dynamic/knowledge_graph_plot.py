"""The plot of a knowledge graph over the steps of a run: a row per expert, from its creation to its removal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.dynamic.graph import LINEAGE
from toolkit.dynamic.records import Epoch, LayerState
from toolkit.run.pictures.plots import GREY, INK, colour_of, ink_on, spread, step_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EDGES = {
    "similarity": ("similar", "#4269d0", "solid", 0.3),
    "coactivation": ("co-activated", "#9aa1ab", "solid", -0.3),
    "split": ("split (arrow to the new expert)", "#3ca951", "solid", 0.0),
    "merge": ("merged into", "#ff725c", "dashed", 0.0),
}
"""Label, colour, style and curvature of each kind of edge."""
STRONGEST = 2
"""Similarities, and co-activations, drawn per active expert; more would hide the rest."""
MOST_EPOCHS = 12
"""Epochs drawn, evenly spaced in longer runs."""


def rows_by_lineage(state: LayerState) -> dict[int, int]:
    """Return the row of each expert of `state` by uid; experts are next to those they were split from."""
    lineage: dict[int, tuple[int, ...]] = {}
    for uid in sorted(state.nodes):
        lineage[uid] = (*lineage.get(state.nodes[uid]["parent"], ()), uid)
    return {uid: row for row, uid in enumerate(sorted(lineage, key=lambda uid: lineage[uid]))}


def draw_knowledge_graph(figure: Figure, epochs: Sequence[Epoch], layers: Sequence[str]) -> None:
    """Draw the graph of each of `layers` at the end of epochs."""
    from matplotlib.lines import Line2D

    last = epochs[-1].layers
    tallest = max(len(last[layer].nodes) for layer in layers)
    figure.set_size_inches(13, max(4.5, 1.5 + 0.42 * tallest) * len(layers))
    for axes, layer in zip(figure.subplots(len(layers), 1, squeeze=False)[:, 0], layers, strict=True):
        _draw_layer(axes, {epoch.step: epoch.layers[layer] for epoch in spread(epochs, MOST_EPOCHS)})
        axes.set_title(f"Experts of {layer or 'the MoE layer'} and their relations")
    kinds = {edge["kind"] for epoch in epochs for layer in layers for edge in epoch.layers[layer].edges}
    shown = [EDGES[kind] for kind in EDGES if kind in kinds]
    handles = [Line2D([], [], color=colour, ls=style, lw=2.4, label=name) for name, colour, style, _ in shown]
    handles.append(Line2D([], [], lw=0, marker="x", ms=8, mew=2, color=INK, label="pruned"))
    title = "area: share of load\nnumber: prevalent class\nwidth: weight"
    figure.legend(handles=handles, loc="outside right upper", fontsize=9, title=title, alignment="left")


def _draw_layer(axes: Axes, states: Mapping[int, LayerState]) -> None:
    """Draw the states of a layer by step."""
    end = max(states)
    last = states[end]
    rows = rows_by_lineage(last)
    for uid, row in rows.items():
        node = last.nodes[uid]
        axes.hlines(row, node["created_at"], node["removed_at"] or end, color=GREY, lw=1, zorder=0)
        if node["fate"] == "pruned":
            axes.plot(node["removed_at"], row, marker="x", ms=8, mew=2, color=INK)
    for edge in last.edges:
        if edge["kind"] in LINEAGE:
            is_split = edge["kind"] == "split"
            step = last.nodes[edge["target"]]["created_at"] if is_split else last.nodes[edge["source"]]["removed_at"]
            _connect(axes, step, rows, edge, lw=1.6, arrowstyle="-|>")
    for step, state in states.items():
        active = set(state.active)
        for kind in (kind for kind in EDGES if kind not in LINEAGE):
            edges = [e for e in state.edges if e["kind"] == kind and {e["source"], e["target"]} <= active]
            for edge in sorted(edges, key=lambda edge: -edge["weight"])[: STRONGEST * len(active)]:
                _connect(axes, step, rows, edge, lw=0.6 + 4 * edge["weight"], arrowstyle="-", alpha=0.55)
        for uid in active:
            node = state.nodes[uid]
            top = next(iter(node["top_classes"]), -1)
            # A class is at least twice as frequent as with equal frequencies.
            prevalent = top >= 0 and node["classes"][top] >= 2 / len(node["classes"])
            diameter = 4 + 26 * math.sqrt(node["share"])
            colour = colour_of(uid)
            axes.plot(step, rows[uid], marker="o", mec="white", zorder=5, color=colour, ms=diameter)
            if prevalent:
                axes.plot(step, rows[uid], marker=f"${top}$", mew=0, zorder=6, color=ink_on(colour), ms=7)
    axes.set_yticks([*rows.values()], [f"expert {uid}" for uid in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    step_axis(axes)


def _connect(axes: Axes, step: int, rows: Mapping[int, int], edge: Mapping[str, Any], **look: Any) -> None:
    _, colour, style, bend = EDGES[edge["kind"]]
    look |= {"color": colour, "ls": style, "connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (step, rows[edge["target"]]), (step, rows[edge["source"]]), arrowprops=look)
