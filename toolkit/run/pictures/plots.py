"""Plots of a run from metrics.jsonl. matplotlib is imported only to draw a plot."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from toolkit.run.folder import write_bytes
from toolkit.run.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

TRAIN, VALIDATION, EVAL, GREY, INK = "#4269d0", "#3ca951", "#ff725c", "#9aa1ab", "#30343b"
CURVES = {"train": ("training", TRAIN), "validation": ("validation", VALIDATION), "eval": ("test", EVAL)}
"""Label and colour of each metric group."""
STYLE: Any = {
    "figure.dpi": 120,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
EXPERTS, RANKS = "tab10", "Dark2"
"""Colour maps of the first experts, which lines of other plots have, too, and of the first ranks."""
LOAD_PREFIX, RANK_LOAD_PREFIX, PLACEMENT_PREFIX = "moe/load/", "moe/rank_load/", "moe/placement/"
MOST_LAYERS, MOST_MAPS = 8, 4
"""Maximum layers in load plots and in placement plots; evenly spaced in deeper models."""
MOST_LINES = 12
"""Maximum experts or ranks drawn as lines, not as a heat map."""
MOST_NAMED = 9
"""Maximum labelled rows of a heat map."""
MOST_IDS = 64
"""Maximum experts per rank and time with ids in the placement plot."""

Placement = Sequence[Sequence[int]]
"""The experts on each rank."""
Loads = Mapping[str, Sequence[tuple[int, Sequence[float | None]]]]
"""By layer, log steps and the load of each expert or rank."""


@dataclass(frozen=True)
class Experts:
    """The experts of a run by layer, for its plots. Numbers of experts are logical ids, or uids of dynamic experts."""

    loads: Loads
    placement: Mapping[str, Placement]
    """Final placement."""
    before: Mapping[str, Placement] = field(default_factory=dict)
    """Before the first move; empty if no expert moved."""
    moves: Mapping[str, Sequence[tuple[int, Placement]]] = field(default_factory=dict)
    """Log steps, each with the placement from this step on."""

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> Self:
        """Read the experts from a run's metrics and results."""
        return cls(
            by_layer(lines, LOAD_PREFIX),
            results.get("expert_placement") or {},
            results.get("placement_before_moves") or {},
            by_layer(lines, PLACEMENT_PREFIX),
        )


def save_figure(path: str | Path, draw: Callable[[Figure], None]) -> Path:
    """Call `draw` on an empty figure and save it as a PNG at `path`, in the toolkit's style. Creates the folder.

    The file is replaced atomically.
    """
    # The object API draws with Agg and does not change the caller's backend, style and open figures.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4))
        draw(figure)
        drawn = io.BytesIO()
        FigureCanvasAgg(figure).print_png(drawn)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, drawn.getvalue(), durable=False)
    return path


def draw_losses(folder: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
    """Draw the losses in the metrics; return the plot by name, none without losses."""
    if not any(points_of(lines, f"{group}/loss") for group in CURVES):
        return {}
    return {"loss": save_figure(folder / "loss.png", lambda figure: draw_loss(figure, lines))}


def by_layer(lines: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, list[tuple[int, Any]]]:
    """Return the log steps and values of the metrics with `prefix`, by layer."""
    names = sorted({name for line in lines for name in line if name.startswith(prefix)}, key=natural)
    return {name.removeprefix(prefix): points_of(lines, name) for name in names}


def save_expert_figures(folder: str | Path, records: str | Path | Iterable[Mapping[str, Any]]) -> dict[str, Path]:
    """Draw the figures of recipes from records of experts in any loop or Trainer. Call it on one rank.

    `expert_load.png` has the load of each expert over steps. With expert parallelism there are also `rank_load.png`,
    `expert_placement.png` and, if experts moved, `expert_moves.png`.

    Args:
        folder: Gets the figures.
        records: Results of `metrics()` of `ExpertParallel` or `RouterMonitor`, each with its "step"; or the path of a
            `metrics.jsonl`, such as the one in the output folder of a Trainer.

    Returns:
        The path of each figure that has content, by name.

    Raises:
        KeyError: A record has no "step".

    Example:
        >>> records = [{"step": 10, "moe/load/block": [0.7, 0.3]}, {"step": 20, "moe/load/block": [0.6, 0.4]}]
        >>> save_expert_figures("figures", records)
        {'expert_load': PosixPath('figures/expert_load.png')}
    """
    lines = list(read_metrics(records) if isinstance(records, str | Path) else records)
    placements = by_layer(lines, PLACEMENT_PREFIX)
    first, last = ({layer: points[at][1] for layer, points in placements.items()} for at in (0, -1))
    moved = any(len(points) > 1 for points in placements.values())
    experts = Experts(by_layer(lines, LOAD_PREFIX), last, first if moved else {}, placements)
    return draw_experts(Path(folder), experts, lines)


def draw_experts(
    folder: Path, experts: Experts, lines: Sequence[Mapping[str, Any]], moved: str | None = None
) -> dict[str, Path]:
    """Draw the load, placement and moves of experts and the load of ranks; return the plots that have content, by name.

    `moved` describes the moves in words.
    """
    drawings: dict[str, Callable[[Figure], None]] = {}
    ranks = by_layer(lines, RANK_LOAD_PREFIX)
    for of, loads, placement in (("expert", experts.loads, experts.placement), ("rank", ranks, {})):
        if any(len(shares) > 1 for points in loads.values() for _, shares in points):
            drawings[f"{of}_load"] = partial(_draw_loads, loads=loads, placement=placement, of=of)
    if any(len(rows) > 1 for rows in experts.placement.values()):
        times = {"Before moves": experts.before, "After moves": experts.placement}
        times = times if experts.before else {"Experts per rank": experts.placement}
        drawings["expert_placement"] = partial(draw_placements, times=times)
    if any(len(rows) > 1 for rows in experts.before.values()):
        drawings["expert_moves"] = partial(_draw_moves, experts=experts, lines=lines, moved=moved)
    return {name: save_figure(folder / f"{name}.png", draw) for name, draw in drawings.items()}


def draw_loss(figure: Figure | SubFigure, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss and, if there is one, the accuracy over steps, with the log steps before which experts moved."""
    from matplotlib.ticker import LogLocator, NullFormatter

    names = ["loss"]
    if any(points_of(lines, f"{group}/accuracy") for group in CURVES):
        names.append("accuracy")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        percent = name == "accuracy"
        finite = []
        for group, (label, colour) in CURVES.items():
            points = points_of(lines, f"{group}/{name}")
            if not points:
                continue
            steps = [step for step, _ in points]
            values = [100 * v if percent else v for _, v in points]
            finite += values
            marker = "o" if group != "train" or len(points) == 1 else ""
            style: dict[str, Any] = {"lw": 1.4 if group == "train" else 1.8, "marker": marker, "ms": 4}
            last = f"{values[-1]:.2f} %" if percent else f"{values[-1]:.4g}"
            axes.plot(steps, values, color=colour, label=f"{label} (last {last})", **style)
        if not percent and min(finite) > 0 and max(finite) > 10 * min(finite):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        mark_steps(axes, _steps_of_moves(lines), "experts moved")
        axes.set_title("Accuracy, %" if percent else "Loss")
        axes.legend(loc="best")
        step_axis(axes)


def _steps_of_moves(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the log steps before which experts moved."""
    return [step for step, experts in points_of(lines, "moe/migrated_experts") if experts]


def mark_steps(axes: Axes, steps: Iterable[int], label: str, **style: Any) -> None:
    """Draw a vertical line at each step."""
    style = {"color": GREY, "lw": 1, "ls": (0, (1, 2)), "zorder": 0, **style}
    for number, step in enumerate(steps):
        axes.axvline(step, label=label if number == 0 else None, **style)


def _draw_loads(
    figure: Figure,
    *,
    loads: Loads,
    placement: Mapping[str, Placement],
    of: str = "expert",
) -> None:
    """Draw the load of each expert or rank over steps, with a panel per layer."""
    layers, names = spread(list(loads), MOST_LAYERS), short_names(list(loads))
    columns = min(2, len(layers))
    rows = math.ceil(len(layers) / columns)
    figure.set_size_inches(10 if columns == 2 else 8, 3.6 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for layer, axes in zip(layers, panels, strict=False):
        draw_load(axes, loads[layer], placement.get(layer), name=names[layer], of=of)
    for axes in panels:
        axes.set_visible(False)


def draw_load(
    axes: Axes,
    points: Sequence[tuple[int, Sequence[float | None]]],
    placement: Placement | None,
    *,
    name: str,
    of: str = "expert",
) -> None:
    """Draw the load of each expert or rank of the layer `name` over steps: lines for few, a heat map for many.

    Experts that are inactive at the end and had no load are left out. The fair share is 1 / active experts.
    """
    unit, colour_map = ("% of assignments", EXPERTS) if of == "expert" else ("% of rows", RANKS)
    steps = [step for step, _ in points]
    known = max((len(shares) for _, shares in points), default=0)
    active = {expert for row in placement or [range(known)] for expert in row}
    ids = [e for e in range(known) if e in active or any(shares[e] for _, shares in points if len(shares) > e)]
    # Layers can grow, and non-finite numbers are null in JSON.
    padded = [[shares[e] if e < len(shares) else None for e in ids] for _, shares in points]
    table = [[math.nan if share is None else 100 * share for share in row] for row in padded]
    fair = 100 / max(1, len(active))
    if len(ids) <= MOST_LINES:
        marker = "o" if len(points) == 1 else ""
        for column, expert in enumerate(ids):
            values = [row[column] for row in table]
            colour = colour_of(expert, colour_map)
            axes.plot(steps, values, color=colour, lw=1.4, marker=marker, ms=4, label=str(expert))
        axes.axhline(fair, color=INK, lw=1.4, ls=(0, (4, 3)), label=f"fair: {fair:.3g} %")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(unit)
        axes.legend(title=of, ncols=1 if len(ids) <= 8 else 2, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        grid = [list(column) for column in zip(*table, strict=True)]
        image = axes.pcolormesh(
            _edges(steps), range(len(ids) + 1), grid, cmap="RdBu_r", vmin=0, vmax=2 * fair, rasterized=True
        )
        bar = axes.figure.colorbar(image, ax=axes, extend="max", pad=0.02, label=unit)
        bar.ax.axhline(fair, color=INK, lw=1)
        bar.ax.annotate(
            "fair", (0, fair), xytext=(-3, 0), textcoords="offset points", ha="right", va="center", fontsize=7
        )
        axes.set_ylabel(of)
        name_rows(axes, ids)
    axes.set_title(f"Load per {of}: {name}" if name else f"Load per {of}")
    step_axis(axes)


def name_rows(axes: Axes, ids: Sequence[int]) -> None:
    """Label some rows of a heat map with their ids."""
    named = spread(range(len(ids)), MOST_NAMED)
    axes.set_yticks([row + 0.5 for row in named], [str(ids[row]) for row in named])


def draw_placements(figure: Figure, *, times: Mapping[str, Mapping[str, Placement]]) -> None:
    """Draw the experts on each rank as boxes, one colour per expert, at each of `times` in turn."""
    known = list(list(times.values())[-1])
    layers, names = spread(known, MOST_MAPS), short_names(known)
    shown = [placement[layer] for placement in times.values() for layer in layers if layer in placement]
    ranks = max(map(len, shown))
    widest = max((len(ids) for rows in shown for ids in rows), default=1) or 1
    width = max(widest, 4)
    figure.set_size_inches(min(14, (1.2 + 0.6 * width) * len(times)), max(2.8, (0.9 + 0.42 * ranks) * len(layers)))
    for layer, panels in zip(layers, figure.subplots(len(layers), len(times), squeeze=False), strict=True):
        before: Placement = []
        for axes, (time, placement) in zip(panels, times.items(), strict=True):
            rows = placement.get(layer, [])
            for rank, ids in enumerate(rows):
                new = set(ids).difference(*before[rank : rank + 1]) if before else set()
                for slot, expert in enumerate(ids):
                    colour = colour_of(expert)
                    edge: dict[str, Any] = {"edgecolor": INK, "lw": 2} if expert in new else {}
                    axes.barh(rank, 0.88, left=slot + 0.02, height=0.8, color=colour, **edge)
                    if widest * len(times) <= MOST_IDS:
                        ink = ink_on(colour)
                        axes.text(slot + 0.46, rank, str(expert), ha="center", va="center", color=ink, fontsize=9)
            before = rows
            named = layer and axes is panels[0]
            axes.set_title(f"{time}: {names[layer]}" if named else time)
            axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
            axes.set_xticks([])
            axes.set_xlim(0, width)
            axes.set_ylim(ranks - 0.4, -0.6)
            axes.spines[["bottom", "left"]].set_visible(False)
            axes.tick_params(length=0)
    if len(times) > 1:
        figure.supxlabel("outlined: new on this rank", fontsize="small", color=INK)


def _draw_moves(figure: Figure, *, experts: Experts, lines: Sequence[Mapping[str, Any]], moved: str | None) -> None:
    """Draw the rank of each expert over steps, below the load of the busiest rank over the mean.

    An expert with replicas has a stripe for each of their ranks.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    changes = {layer: [(0, rows), *experts.moves.get(layer, [])] for layer, rows in experts.before.items()}
    changed = [layer for layer, points in changes.items() if any(rows != points[0][1] for _, rows in points)]
    layers, names = spread(changed or list(changes), MOST_MAPS), short_names(list(changes))
    ranks = max(len(rows) for points in changes.values() for _, rows in points)
    colours = [colour_of(rank, RANKS) for rank in range(ranks)]
    figure.set_size_inches(10, 2.2 + 2.6 * len(layers))
    heights = [1.6, *[2.6] * len(layers)]
    top, *maps = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for name, label, width in (("", "each forward pass", 1.4), ("_of_sum", "load since the last log step", 0.8)):
        points = points_of(lines, f"moe/rank_imbalance{name}")
        top.plot([step for step, _ in points], [value for _, value in points], color=TRAIN, lw=width, label=label)
    mark_steps(top, _steps_of_moves(lines), "experts moved")
    top.set_title("Busiest rank over the mean")
    step_axis(top)
    for axes, layer in zip(maps, layers, strict=True):
        ids = sorted({expert for _, rows in changes[layer] for row in rows for expert in row})
        on_ranks = [
            [[float(rank) for rank, row in enumerate(rows) if expert in row] or [math.nan] for expert in ids]
            for _, rows in changes[layer]
        ]
        stripes = max(len(held) for column in on_ranks for held in column)
        table = [[held[i * len(held) // stripes] for held in column for i in range(stripes)] for column in on_ranks]
        axes.pcolormesh(
            [*(step for step, _ in changes[layer]), lines[-1]["step"]],
            [row / stripes for row in range(len(ids) * stripes + 1)],
            list(zip(*table, strict=True)),
            cmap=ListedColormap(colours),
            vmin=-0.5,
            vmax=ranks - 0.5,
            rasterized=True,
        )
        axes.set_title(f"Rank of each expert: {names[layer]}" if layer else "Rank of each expert")
        axes.set_ylabel("expert")
        name_rows(axes, ids)
        step_axis(axes)
        axes.grid(visible=False)
    for axes in (top, *maps):
        axes.label_outer()
    handles = [Patch(color=colours[rank], label=str(rank)) for rank in spread(range(ranks), MOST_LINES)]
    beside: Any = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "fontsize": 8}
    top.legend(**beside)
    maps[0].legend(handles=handles, title="rank", **beside)
    if moved is not None:
        figure.supxlabel(f"moved experts: {moved}", fontsize="small", color=INK)


def ink_on(colour: Mapping[int, float] | Sequence[float]) -> str:
    """Return a text colour that is readable on `colour`."""
    return "white" if 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] < 0.6 else INK


def short_names(layers: Sequence[str]) -> dict[str, str]:
    """Strip the common prefix and suffix of layer names: `layers.3` for `model.layers.3.mlp.experts`."""
    if len(layers) < 2:
        return {layer: layer for layer in layers}
    parts = [layer.split(".") for layer in layers]
    head = _shared(parts)
    tail = _shared([part[:head:-1] for part in parts])
    short = [".".join(part[max(0, head - 1) : len(part) - tail]) for part in parts]
    return dict(zip(layers, short, strict=True))


def _shared(rows: Sequence[Sequence[str]]) -> int:
    """Return the length of the common prefix."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` evenly spaced `items`, with first and last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def colour_of(number: int, colour_map: str = EXPERTS) -> Any:
    """Return the colour of an expert, a rank or a line, equal in all plots of all runs."""
    from matplotlib import colormaps

    first = colormaps[colour_map]
    # Multiples of the golden ratio are far from one another.
    return first(number) if number < first.N else colormaps["turbo"](0.05 + 0.9 * ((0.5 + number * 0.618034) % 1))


def step_axis(axes: Axes, label: str = "step") -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)


def points_of(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, Any]]:
    """Return (step, value) of each log step with a value for `name`."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _edges(steps: Sequence[int]) -> list[float]:
    """Return cell edges around `steps`."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    return [2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]]


def natural(name: str) -> list[Any]:
    """Sort layer 2 before layer 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def draw_imbalances(figure: Figure, panels: Mapping[str, Mapping[str, Sequence[float]]], *, first_step: int) -> None:
    """Draw imbalance over steps, a panel per case and a line per planner, smoothed over a fortieth of the steps."""
    planners = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = {name: colour_of(number - 1) if number else GREY for number, name in enumerate(planners)}
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure.set_size_inches(4.2 * columns, 2.6 * rows + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        for name, series in lines.items():
            width = max(1, len(series) // 40)
            smooth = [statistics.fmean(series[i : i + width]) for i in range(0, len(series), width)]
            steps = [first_step + i * width + width / 2 for i in range(len(smooth))]
            # Broad lines below narrow ones, because planners that do the same draw the same line.
            width_of_line = 1.2 + 1.3 * (len(planners) - 1 - planners.index(name))
            axes.plot(steps, smooth, color=colours[name], lw=width_of_line)
        axes.set_title(title)
        axes.set_ylabel("busiest rank / mean")
        axes.set_ylim(1, max(1.1, axes.get_ylim()[1]))
        step_axis(axes)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    handles = grid.flat[0].get_lines()
    figure.legend(handles, planners[: len(handles)], loc="outside lower center", ncols=len(planners))
