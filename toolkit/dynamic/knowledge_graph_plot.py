"""The plot of a knowledge graph: experts on a circle, each at the same position in all epochs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import networkx as nx

from toolkit.dynamic.graph import LINEAGE
from toolkit.dynamic.records import Epoch, LayerState, describe
from toolkit.run.pictures.plots import GREY, INK, palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
PLAIN = "#8d95a3"
"""The colour of an expert without a prevalent class."""
EDGES = {
    "similarity": ("similar", "#4269d0", "solid", 0.1),
    "coactivation": ("co-activated", "#9aa1ab", "solid", -0.06),
    "split": ("split (arrow to the new expert)", "#3ca951", "solid", 0.22),
    "merge": ("merged into", "#ff725c", "dashed", 0.22),
}
"""Label, colour, style and curvature of each kind of edge."""
STRONGEST = 3
"""Similarities, and co-activations, drawn per active expert; more would hide the rest."""
MOST_CLASSES = 20
"""Classes named in the legend."""


def positions_on_circle(state: LayerState) -> dict[int, Point]:
    """Return the position of each expert of `state` by uid; experts are next to those they were split from."""
    lineage: dict[int, tuple[int, ...]] = {}
    for uid in sorted(state.nodes):
        lineage[uid] = (*lineage.get(state.nodes[uid]["parent"], ()), uid)
    turn = 2 * math.pi / max(1, len(lineage))
    order = sorted(lineage, key=lambda uid: lineage[uid])
    return {uid: (math.sin(turn * i), math.cos(turn * i)) for i, uid in enumerate(order)}


def draw_knowledge_graph(figure: Figure, epoch: Epoch, positions: Mapping[str, Mapping[int, Point]]) -> None:
    """Draw the graph of each layer of `positions` at the end of `epoch`."""
    from matplotlib.lines import Line2D

    figure.set_size_inches(7.2 * len(positions) + 2.6, 7.8)
    states = [epoch.layers[layer] for layer in positions]
    num_classes = max((len(node["classes"]) for state in states for node in state.nodes.values()), default=0)
    colours = palette(num_classes)
    panels = figure.subplots(1, len(positions), squeeze=False)[0]
    for axes, (layer, points), state in zip(panels, positions.items(), states, strict=True):
        _draw_layer(axes, state, points, colours, first_step=epoch.first_step)
        name = f"{layer}: " if layer and len(positions) > 1 else ""
        events = "; ".join(describe(event, state) for event in epoch.events_of(layer)) or "no change"
        axes.set_title(
            f"{name}epoch {epoch.name}, step {epoch.step:,}, {len(state.active)} active experts\n"
            + textwrap.fill(events, 75, max_lines=3, placeholder=" ...")
        )
    dot: dict[str, Any] = {"lw": 0, "marker": "o", "ms": 9}
    handles = [Line2D([], [], color=colour, ls=style, lw=2.4, label=name) for name, colour, style, _ in EDGES.values()]
    handles += [
        Line2D([], [], **dot, color="white", label="new in this epoch", mec=INK, mew=2.2),
        Line2D([], [], lw=0, marker="x", ms=8, mew=2, color=INK, label="removed (grey: in an earlier epoch)"),
        Line2D([], [], **dot, color=PLAIN, label="no prevalent class"),
        *(Line2D([], [], **dot, color=colour, label=f"class {c}") for c, colour in enumerate(colours[:MOST_CLASSES])),
    ]
    title = "area: share of load\nwidth: weight"
    figure.legend(handles=handles, loc="outside right upper", fontsize=9, title=title, alignment="left")


def _draw_layer(
    axes: Axes, state: LayerState, points: Mapping[int, Point], colours: Sequence[Any], *, first_step: int
) -> None:
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set(xlim=(-1.85, 1.85), ylim=(-1.7, 1.7))
    room = min(1.0, 14 / max(1, len(points)))
    active = state.active
    # Diameters in points, squared.
    sizes = dict.fromkeys(state.nodes, 64.0)
    sizes |= {uid: (2 * room * (11 + 45 * math.sqrt(state.nodes[uid]["share"]))) ** 2 for uid in active}
    graph = nx.DiGraph()
    graph.add_nodes_from(state.nodes)
    for kind, (_, colour, style, bend) in EDGES.items():
        edges = [edge for edge in state.edges if edge["kind"] == kind]
        if kind not in LINEAGE:
            edges = [edge for edge in edges if {edge["source"], edge["target"]} <= {*active}]
            edges = sorted(edges, key=lambda edge: -edge["weight"])[: STRONGEST * len(active)]
        nx.draw_networkx_edges(
            graph,
            points,
            [(edge["source"], edge["target"]) for edge in edges],
            width=[1.6 if kind in LINEAGE else 0.6 + 5 * edge["weight"] for edge in edges],
            edge_color=colour,
            style=style,
            alpha=0.9 if kind in LINEAGE else 0.55,
            arrows=True,
            arrowstyle="-|>" if kind in LINEAGE else "-",
            arrowsize=14,
            node_size=list(sizes.values()),
            nodelist=list(sizes),
            connectionstyle=f"arc3,rad={bend}",
            ax=axes,
        )
    for uid, node in state.nodes.items():
        top = next(iter(node["top_classes"]), -1)
        # A class is at least twice as frequent as with equal frequencies.
        prevalent = top >= 0 and node["classes"][top] >= 2 / len(node["classes"])
        look: dict[str, Any] = {"node_color": [colours[top]] if prevalent else PLAIN, "linewidths": 2.5}
        look["edgecolors"] = INK if node["created_at"] > first_step else "white"
        text = f"{100 * node['share']:.0f} % of load"
        if top >= 0:
            text = f"{100 * node['classes'][top]:.0f} % class {top}\n{text}"
        distance = 1.2 + 0.3 * room
        if not node["active"]:
            look = {"node_color": INK if node["removed_at"] > first_step else GREY, "node_shape": "x", "linewidths": 2}
            text = str(uid)
            distance = 1.15
        nx.draw_networkx_nodes(graph, points, [uid], node_size=sizes[uid], ax=axes, **look)
        outside = (distance * points[uid][0], distance * points[uid][1])
        nx.draw_networkx_labels(graph, {uid: outside}, {uid: text}, font_size=5 + 3 * room, font_color=INK, ax=axes)
    inside = {uid: str(uid) for uid in active}
    nx.draw_networkx_labels(
        graph, points, inside, font_size=7 + 4 * room, font_color="white", font_weight="bold", ax=axes
    )
