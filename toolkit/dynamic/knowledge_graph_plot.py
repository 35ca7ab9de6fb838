"""The picture of a knowledge graph: experts on a circle, each at the same position in all epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.dynamic.records import Epoch, LayerState, describe
from toolkit.run.pictures.plots import GREY, INK, palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
PLAIN = "#8d95a3"
"""The colour of an expert without a prevalent class."""
EDGES = {
    "similarity": ("similar", "#4269d0", "-"),
    "coactivation": ("co-activated", "#9aa1ab", "-"),
    "split": ("split (arrow to the new expert)", "#3ca951", "-"),
    "merge": ("merged into", "#ff725c", (0, (4, 2))),
}
STRONGEST = 3
"""Co-activation edges drawn of each expert; more would hide the rest."""
MOST_EVENTS = 6
"""Events named in a title."""
MOST_CLASSES = 20
"""Classes named in the legend."""


def positions_on_circle(states: Sequence[LayerState]) -> dict[int, Point]:
    """The position of every expert that the layer ever had, by uid; experts are next to those they were split from."""
    nodes = {uid: node for state in states for uid, node in state.nodes.items()}
    children: dict[int | None, list[int]] = {}
    for uid in sorted(nodes):
        children.setdefault(nodes[uid]["parent"], []).append(uid)
    order: list[int] = []
    waiting = children.get(None, [])[::-1]
    while waiting:
        uid = waiting.pop()
        order.append(uid)
        waiting += children.get(uid, [])[::-1]
    turn = 2 * math.pi / max(1, len(order))
    return {uid: (math.sin(turn * i), math.cos(turn * i)) for i, uid in enumerate(order)}


def draw_knowledge_graph(figure: Figure, epoch: Epoch, positions: Mapping[str, Mapping[int, Point]]) -> None:
    """The graph of each layer of `positions` at the end of `epoch`."""
    figure.set_size_inches(7.2 * len(positions) + 2.6, 7.8)
    num_classes = 0
    for (layer, points), axes in zip(
        positions.items(), figure.subplots(1, len(positions), squeeze=False)[0], strict=True
    ):
        state = epoch.layers[layer]
        num_classes = max([num_classes, *(len(node["classes"]) for node in state.nodes.values())])
        _draw_layer(axes, state, points, palette(max(1, num_classes)), first_step=epoch.first_step)
        name = f"{layer}: " if layer and len(positions) > 1 else ""
        axes.set_title(
            f"{name}epoch {epoch.name}, step {epoch.step:,}, {len(state.active)} active experts\n"
            f"{_events(epoch, layer)}",
            loc="left",
        )
    _add_legend(figure, num_classes)


def _events(epoch: Epoch, layer: str) -> str:
    state = epoch.layers[layer]
    events = [describe(event, state) for event in epoch.events_of(layer)]
    if len(events) > MOST_EVENTS:
        events = [*events[:MOST_EVENTS], f"and {len(events) - MOST_EVENTS} more"]
    lines = ["; ".join(events[i : i + 3]) for i in range(0, len(events), 3)]
    return ";\n".join(lines) or "no change"


def _draw_layer(
    axes: Axes, state: LayerState, points: Mapping[int, Point], colours: Sequence[Any], *, first_step: int
) -> None:
    from matplotlib.patches import FancyArrowPatch

    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_xlim(-1.62, 1.62)
    axes.set_ylim(-1.42, 1.38)
    room = min(1.0, 14 / max(1, len(points)))
    # In points. The area grows with the share of the load.
    radius = {
        uid: room * (11 + 45 * math.sqrt(node["share"]) if node["active"] else 8) for uid, node in state.nodes.items()
    }
    for edge in _edges_to_draw(state):
        a = edge["source"]
        b = edge["target"]
        kind = edge["kind"]
        _, colour, dashes = EDGES[kind]
        lineage = kind in ("split", "merge")
        axes.add_patch(
            FancyArrowPatch(
                points[a],
                points[b],
                arrowstyle="-|>" if lineage else "-",
                mutation_scale=14,
                connectionstyle=f"arc3,rad={0.22 if lineage else 0.1 if kind == 'similarity' else -0.06}",
                shrinkA=radius[a],
                shrinkB=radius[b],
                color=colour,
                ls=dashes,
                lw=1.6 if lineage else 0.6 + 5 * edge["weight"],
                alpha=0.9 if lineage else 0.55,
                zorder=2 if lineage else 1,
            )
        )
    for uid, node in state.nodes.items():
        x, y = points[uid]
        if not node["active"]:
            just_removed = node["removed_at"] is not None and node["removed_at"] > first_step
            axes.plot(x, y, marker="x", ms=9 * room + 2, mew=2, color=INK if just_removed else GREY, zorder=3)
            _beside(axes, (x, y), 12, str(uid), size=8, color=GREY)
            continue
        top = node["top_classes"][:1]
        # A class is at least twice as frequent as with equal frequencies.
        colour = colours[top[0]] if top and node["classes"][top[0]] >= 2 / len(node["classes"]) else PLAIN
        new = node["created_at"] > 0 and node["created_at"] > first_step
        rim: dict[str, Any] = {"mec": INK if new else "white", "mew": 2.5 if new else 1.2}
        axes.plot(x, y, marker="o", ms=2 * radius[uid], color=colour, zorder=3, **rim)
        axes.text(x, y, str(uid), ha="center", va="center", size=7 + 4 * room, weight="bold", color="white", zorder=4)
        if node["top_classes"]:
            most = node["top_classes"][0]
            seen = 100 * node["classes"][most]
            share = 100 * node["share"]
            text = f"{seen:.0f} % class {most}\n{share:.0f} % of load"
            _beside(axes, (x, y), radius[uid] + 4, text, size=5 + 3 * room, color=INK)


def _beside(axes: Axes, point: Point, distance: float, text: str, *, size: float, color: str) -> None:
    """Write on the outer side of a point on the circle, `distance` points away."""
    x, y = point
    axes.annotate(
        text,
        point,
        (distance * x, distance * y),
        textcoords="offset points",
        ha="left" if x > 0.2 else "right" if x < -0.2 else "center",
        va="bottom" if y > 0.2 else "top" if y < -0.2 else "center",
        size=size,
        color=color,
        zorder=4,
    )


def _edges_to_draw(state: LayerState) -> list[Mapping[str, Any]]:
    """Split and merge edges, similarities of active experts, and each one's strongest co-activations."""
    active = set(state.active)
    lineages = [edge for edge in state.edges if edge["kind"] in ("split", "merge")]
    measured = [edge for edge in state.edges if edge["kind"] not in ("split", "merge")]
    measured = [edge for edge in measured if {edge["source"], edge["target"]} <= active]
    together = [edge for edge in measured if edge["kind"] == "coactivation"]
    strongest: list[Mapping[str, Any]] = []
    for uid in active:
        own = [edge for edge in together if uid in (edge["source"], edge["target"])]
        strongest += sorted(own, key=lambda edge: -edge["weight"])[:STRONGEST]
    kept = {(edge["source"], edge["target"]) for edge in strongest}
    return [
        *(edge for edge in together if (edge["source"], edge["target"]) in kept),
        *(edge for edge in measured if edge["kind"] == "similarity"),
        *lineages,
    ]


def _add_legend(figure: Figure, num_classes: int) -> None:
    from matplotlib.lines import Line2D

    def dot(colour: Any, label: str, **more: Any) -> Line2D:
        return Line2D([], [], lw=0, marker="o", ms=9, color=colour, label=label, **more)

    handles = [Line2D([], [], color=colour, ls=dashes, lw=2.4, label=label) for label, colour, dashes in EDGES.values()]
    handles += [
        dot("white", "new in this epoch", mec=INK, mew=2.2),
        Line2D([], [], lw=0, marker="x", ms=8, mew=2, color=INK, label="removed (grey: in an earlier epoch)"),
        dot("white", "size: share of load", mec=GREY),
        Line2D([], [], lw=0, label=f"edges: width is weight,\n{STRONGEST} strongest pairs each"),
    ]
    if num_classes:
        handles += [dot(PLAIN, "no prevalent class"), Line2D([], [], lw=0, label="most frequent class:")]
        shown = min(num_classes, MOST_CLASSES)
        handles += [dot(colour, str(c)) for c, colour in enumerate(palette(num_classes)[:shown])]
    figure.legend(handles=handles, loc="outside right upper", fontsize=9)
