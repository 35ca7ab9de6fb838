"""The picture of a knowledge graph: experts on a circle, each in the same place from epoch to epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.pictures.plots import GREY, INK, palette
from toolkit.tracking.lifecycle_records import Epoch, LayerState, tell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
PLAIN = "#8d95a3"
"""Of an expert that sees all classes much alike."""
EDGES = {
    "similarity": ("alike", "#4269d0", "-"),
    "coactivation": ("fire together", "#9aa1ab", "-"),
    "split": ("split from (arrow to child)", "#3ca951", "-"),
    "merge": ("merged into", "#ff725c", (0, (4, 2))),
}
STRONGEST = 3
"""Co-activations drawn of each expert: those of all pairs would be a ball of wool."""
MOST_EVENTS = 6
"""Events named in a title."""
MOST_CLASSES = 20
"""Classes named in the legend."""


def places_on_circle(states: Sequence[LayerState]) -> dict[int, Point]:
    """A place for everybody who ever lived in a layer, children beside their parents."""
    nodes = {id: node for state in states for id, node in state.nodes.items()}
    children: dict[int | None, list[int]] = {}
    for id in sorted(nodes):
        children.setdefault(nodes[id]["parent"], []).append(id)
    order: list[int] = []
    waiting = children.get(None, [])[::-1]
    while waiting:
        id = waiting.pop()
        order.append(id)
        waiting += children.get(id, [])[::-1]
    turn = 2 * math.pi / max(1, len(order))
    return {id: (math.sin(turn * i), math.cos(turn * i)) for i, id in enumerate(order)}


def draw_knowledge_graph(figure: Figure, epoch: Epoch, places: Mapping[str, Mapping[int, Point]]) -> None:
    """The graph of each layer of `places` at the end of `epoch`."""
    figure.set_size_inches(7.2 * len(places) + 2.6, 7.8)
    num_classes = 0
    for (layer, points), axes in zip(places.items(), figure.subplots(1, len(places), squeeze=False)[0], strict=True):
        state = epoch.layers[layer]
        num_classes = max([num_classes, *(len(node["classes"]) for node in state.nodes.values())])
        _draw_layer(axes, state, points, palette(max(1, num_classes)), first_step=epoch.began)
        name = f"{layer}: " if layer and len(places) > 1 else ""
        axes.set_title(
            f"{name}epoch {epoch.name}, step {epoch.step:,}, {len(state.active)} living experts\n{_news(epoch, layer)}",
            loc="left",
        )
    _add_legend(figure, num_classes)


def _news(epoch: Epoch, layer: str) -> str:
    state = epoch.layers[layer]
    news = [tell(event, state) for event in epoch.events_of(layer)]
    if len(news) > MOST_EVENTS:
        news = [*news[:MOST_EVENTS], f"and {len(news) - MOST_EVENTS} more"]
    lines = ["; ".join(news[i : i + 3]) for i in range(0, len(news), 3)]
    return ";\n".join(lines) or "nobody was born, merged or pruned"


def _draw_layer(
    axes: Axes, state: LayerState, points: Mapping[int, Point], colours: Sequence[Any], *, first_step: int
) -> None:
    from matplotlib.patches import FancyArrowPatch

    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_xlim(-1.62, 1.62)
    axes.set_ylim(-1.42, 1.38)
    room = min(1.0, 14 / max(1, len(points)))
    radius = {id: _radius(node, room) for id, node in state.nodes.items()}
    for edge in _edges_to_draw(state):
        a, b, kind = edge["source"], edge["target"], edge["kind"]
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
    for id, node in state.nodes.items():
        x, y = points[id]
        if not node["active"]:
            gone_now = node["removed_at"] is not None and node["removed_at"] > first_step
            axes.plot(x, y, marker="x", ms=9 * room + 2, mew=2, color=INK if gone_now else GREY, zorder=3)
            _beside(axes, (x, y), 12, str(id), size=8, color=GREY)
            continue
        colour = colours[node["top_classes"][0]] if _stands_out(node) else PLAIN
        new = node["created_at"] > 0 and node["created_at"] > first_step
        rim: dict[str, Any] = {"mec": INK if new else "white", "mew": 2.5 if new else 1.2}
        axes.plot(x, y, marker="o", ms=2 * radius[id], color=colour, zorder=3, **rim)
        axes.text(x, y, str(id), ha="center", va="center", size=7 + 4 * room, weight="bold", color="white", zorder=4)
        if node["top_classes"]:
            most = node["top_classes"][0]
            seen, share = 100 * node["classes"][most], 100 * node["share"]
            text = f"{seen:.0f} % class {most}\n{share:.0f} % of copies"
            _beside(axes, (x, y), radius[id] + 4, text, size=5 + 3 * room, color=INK)


def _stands_out(node: Mapping[str, Any]) -> bool:
    """Whether one class is twice as frequent with an expert as an even share."""
    return bool(node["top_classes"]) and node["classes"][node["top_classes"][0]] >= 2 / len(node["classes"])


def _beside(axes: Axes, point: Point, distance: float, text: str, *, size: float, color: str) -> None:
    """Write outwards of a point of the circle, `distance` points away."""
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
    """Lineages, and what was measured between the living: of co-activations each expert's strongest."""
    active = set(state.active)
    lineages = [edge for edge in state.edges if edge["kind"] in ("split", "merge")]
    measured = [edge for edge in state.edges if edge["kind"] not in ("split", "merge")]
    measured = [edge for edge in measured if {edge["source"], edge["target"]} <= active]
    together = [edge for edge in measured if edge["kind"] == "coactivation"]
    strongest: list[Mapping[str, Any]] = []
    for id in active:
        own = [edge for edge in together if id in (edge["source"], edge["target"])]
        strongest += sorted(own, key=lambda edge: -edge["weight"])[:STRONGEST]
    kept = {(edge["source"], edge["target"]) for edge in strongest}
    return [
        *(edge for edge in together if (edge["source"], edge["target"]) in kept),
        *(edge for edge in measured if edge["kind"] == "similarity"),
        *lineages,
    ]


def _radius(node: Mapping[str, Any], room: float) -> float:
    """In points: it grows with the root of the share of traffic."""
    return room * (11 + 45 * math.sqrt(node["share"])) if node["active"] else 8 * room


def _add_legend(figure: Figure, num_classes: int) -> None:
    from matplotlib.lines import Line2D

    def dot(colour: Any, label: str, **more: Any) -> Line2D:
        return Line2D([], [], lw=0, marker="o", ms=9, color=colour, label=label, **more)

    handles = [Line2D([], [], color=colour, ls=dashes, lw=2.4, label=label) for label, colour, dashes in EDGES.values()]
    handles += [
        dot("white", "born in this epoch", mec=INK, mew=2.2),
        Line2D([], [], lw=0, marker="x", ms=8, mew=2, color=INK, label="gone (grey: before)"),
        dot("white", "size: share of copies", mec=GREY),
        Line2D([], [], lw=0, label=f"edges: width is weight,\n{STRONGEST} strongest pairs each"),
    ]
    if num_classes:
        handles += [dot(PLAIN, "no class stands out"), Line2D([], [], lw=0, label="most seen class:")]
        shown = min(num_classes, MOST_CLASSES)
        handles += [dot(colour, str(c)) for c, colour in enumerate(palette(num_classes)[:shown])]
    figure.legend(handles=handles, loc="outside right upper", fontsize=9)
