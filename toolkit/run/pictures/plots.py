"""Pictures of a run, drawn from metrics.jsonl. matplotlib is loaded only when there is something to draw."""

from __future__ import annotations

import io
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.run.folder import write_bytes
from toolkit.run.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

TRAIN, VALIDATION, EVAL, GREY, INK = "#4269d0", "#3ca951", "#ff725c", "#9aa1ab", "#30343b"
CURVES = {"train": ("training", TRAIN), "validation": ("validation", VALIDATION), "eval": ("test", EVAL)}
"""Groups of metrics, and how their curves are called and coloured."""
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
LOAD_PREFIX = "moe/load/"
MOST_LAYERS = 8
"""Panels of the load picture; of a deeper model the layers shown are spread evenly."""
MOST_NAMED = 9
"""Rows of a heat map that have the number of their expert."""
MOST_IDS = 32
"""Experts per rank up to which their ids are written out in the placement picture."""


def save_figure(path: Path, draw: Callable[[Figure], None]) -> Path:
    """Write what `draw` puts on an empty figure as a PNG at `path`, in the toolkit's style. Makes its folder.

    A kill leaves the picture that was there, or the new one.
    """
    # The object API draws with Agg and leaves the caller's backend, style and open figures alone.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4))
        draw(figure)
        drawn = io.BytesIO()
        FigureCanvasAgg(figure).print_png(drawn)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, drawn.getvalue(), durable=False)
    return path


def draw_plots(
    folder: Path, placement: Mapping[str, Sequence[Sequence[int]]] | None = None, moves: str | None = None
) -> dict[str, Path]:
    """Draw what the metrics of the run in `folder` allow; return picture files by name.

    `placement` maps each layer to the experts on each rank; `moves` says how experts moved.
    """
    lines = list(read_metrics(folder / "metrics.jsonl"))
    drawn = {}
    if any(points_of(lines, name) for name in ("train/loss", "eval/loss")):
        drawn["loss"] = save_figure(folder / "loss.png", lambda figure: draw_loss(figure, lines, moves))
    return drawn | draw_experts(folder, expert_loads(lines), placement or {})


def expert_loads(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, Any]]]:
    """Step and load of each logical expert on the lines of metrics, by layer."""
    lines = list(lines)
    layers = sorted({name for line in lines for name in line if name.startswith(LOAD_PREFIX)}, key=_natural)
    return {layer.removeprefix(LOAD_PREFIX): points_of(lines, layer) for layer in layers}


def draw_experts(
    folder: Path,
    loads: Mapping[str, Sequence[tuple[int, list[float | None]]]],
    placement: Mapping[str, Sequence[Sequence[int]]],
) -> dict[str, Path]:
    """Draw the load of experts and their placement, as far as there are any; return picture files by name."""
    drawings: dict[str, Callable[[Figure], None]] = {}
    if loads:
        drawings["expert_load"] = lambda figure: _draw_loads(figure, loads, placement)
    if placement:
        drawings["expert_placement"] = lambda figure: _draw_placement(figure, placement)
    return {name: save_figure(folder / f"{name}.png", draw) for name, draw in drawings.items()}


def draw_loss(figure: Figure | SubFigure, lines: Sequence[Mapping[str, Any]], moved: str | None = None) -> None:
    """Loss, and accuracy where there is one, over steps, with the lines before which a planner moved experts, and
    `moved`, how, below."""
    from matplotlib.ticker import LogLocator, NullFormatter

    moves = [step for step, experts in points_of(lines, "moe/migrated_experts") if experts]
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
            style: dict[str, Any] = {"lw": 1.4} if group == "train" else {"lw": 1.8, "marker": "o", "ms": 4}
            last = f"{values[-1]:.2f} %" if percent else f"{values[-1]:.4g}"
            axes.plot(steps, values, color=colour, label=f"{label} (last {last})", **style)
        if not percent and min(finite) > 0 and max(finite) > 10 * min(finite):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        for number, step in enumerate(moves):
            once = "experts moved" if number == 0 else None
            axes.axvline(step, color=GREY, lw=0.8, ls=(0, (1, 2)), zorder=0, label=once)
        axes.set_title("Accuracy, %" if percent else "Loss")
        axes.legend(loc="best")
        step_axis(axes)
    if moved is not None:
        figure.supxlabel(f"moved experts: {moved}", fontsize="small", color=INK)


def _draw_loads(
    figure: Figure,
    loads: Mapping[str, Sequence[tuple[int, list[float | None]]]],
    placement: Mapping[str, Sequence[Sequence[int]]],
) -> None:
    """Fraction of assignments per expert over time: lines for few experts, a heat map for many.

    Experts that are inactive at the end and had no load are left out. The fair share is 1 / active experts.
    """
    layers, names = spread(list(loads), MOST_LAYERS), short_names(list(loads))
    columns = min(2, len(layers))
    rows = math.ceil(len(layers) / columns)
    figure.set_size_inches(10 if columns == 2 else 8, 3.6 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for layer, axes in zip(layers, panels, strict=False):
        points = loads[layer]
        steps = [step for step, _ in points]
        known = max(len(shares) for _, shares in points)
        active = {expert for row in placement.get(layer, [range(known)]) for expert in row}
        ids = [e for e in range(known) if e in active or any(shares[e] for _, shares in points if len(shares) > e)]
        experts = len(ids)
        # A layer may have grown, and what is not a number is null in JSON.
        table = [[_percent(shares[e] if e < len(shares) else None) for e in ids] for _, shares in points]
        fair = 100 / len(active)
        if experts <= 16:
            for column, (expert, colour) in enumerate(zip(ids, palette(experts), strict=True)):
                axes.plot(steps, [row[column] for row in table], color=colour, lw=1.4, label=str(expert))
            axes.axhline(fair, color=INK, lw=1.4, ls=(0, (4, 3)), label=f"fair: {fair:.3g} %")
            axes.set_ylim(bottom=0)
            axes.set_ylabel("% of assignments")
            axes.legend(
                title="expert", ncols=1 if experts <= 8 else 2, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
            )
        else:
            grid = [list(column) for column in zip(*table, strict=True)]
            image = axes.pcolormesh(
                _edges(steps), range(experts + 1), grid, cmap="RdBu_r", vmin=0, vmax=2 * fair, rasterized=True
            )
            bar = figure.colorbar(image, ax=axes, extend="max", pad=0.02, label="% of assignments")
            bar.ax.axhline(fair, color=INK, lw=1)
            bar.ax.annotate(
                "fair", (0, fair), xytext=(-3, 0), textcoords="offset points", ha="right", va="center", fontsize=7
            )
            axes.set_ylabel("expert")
            rows_named = spread(range(experts), MOST_NAMED)
            axes.set_yticks([row + 0.5 for row in rows_named], [str(ids[row]) for row in rows_named])
        axes.set_title(f"Load per expert: {names[layer]}" if layer else "Load per expert")
        step_axis(axes)
    for axes in panels:
        axes.set_visible(False)


def _percent(share: float | None) -> float:
    return math.nan if share is None else 100 * share


def _draw_placement(figure: Figure, placement: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Returns which experts each rank holds: one row of boxes per rank, in one colour per expert."""
    ranks = max(len(by_rank) for by_rank in placement.values())
    widest = max((len(ids) for by_rank in placement.values() for ids in by_rank), default=1) or 1
    experts = 1 + max((i for by_rank in placement.values() for ids in by_rank for i in ids), default=0)
    colours = palette(experts)
    width, names = max(widest, 6), short_names(list(placement))
    figure.set_size_inches(min(14, 1.2 + 0.6 * width), (0.9 + 0.42 * ranks) * len(placement))
    for axes, (layer, by_rank) in zip(
        figure.subplots(len(placement), 1, squeeze=False).flat, placement.items(), strict=True
    ):
        for rank, ids in enumerate(by_rank):
            for slot, expert in enumerate(ids):
                colour = colours[expert]
                axes.barh(rank, 0.92, left=slot, height=0.8, color=colour)
                if widest <= MOST_IDS:
                    ink = ink_on(colour)
                    axes.text(slot + 0.46, rank, str(expert), ha="center", va="center", color=ink, fontsize=9)
        axes.set_title(f"Experts per process: {names[layer]}" if layer else "Experts per process")
        axes.set_yticks(range(len(by_rank)), [f"rank {rank}" for rank in range(len(by_rank))])
        axes.set_xticks([])
        axes.set_xlim(0, width)
        axes.set_ylim(ranks - 0.4, -0.6)
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.tick_params(length=0)


def ink_on(colour: Mapping[int, float] | Sequence[float]) -> str:
    """A text colour that is readable on `colour`."""
    return "white" if 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] < 0.6 else INK


def short_names(layers: Sequence[str]) -> dict[str, str]:
    """Each layer's name without what all have in common: `layers.3` of `model.layers.3.mlp.experts`."""
    if len(layers) < 2:
        return {layer: layer for layer in layers}
    parts = [layer.split(".") for layer in layers]
    head = _shared(parts)
    tail = _shared([part[:head:-1] for part in parts])
    short = [".".join(part[max(0, head - 1) : len(part) - tail]) for part in parts]
    return dict(zip(layers, short, strict=True))


def _shared(rows: Sequence[Sequence[str]]) -> int:
    """How many entries all rows begin with."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of `items`, evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def palette(count: int) -> list[Any]:
    """`count` colours that can be told apart as far as that is possible."""
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](i) for i in range(count)]
    return [colormaps["turbo"](0.05 + 0.9 * i / (count - 1)) for i in range(count)]


def step_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)


def points_of(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, Any]]:
    """(step, value) of each line that has a value for `name`."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _edges(steps: Sequence[int]) -> list[float]:
    """The borders of cells around `steps`."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    return [2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.replace("/", ".").split(".")]


def draw_imbalances(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], *, first_step: int) -> None:
    """Draw imbalance over steps, a panel per case and a line per planner, smoothed over a fortieth of the steps."""
    save_figure(path, lambda figure: _draw_imbalances(figure, panels, first_step))


def _draw_imbalances(figure: Figure, panels: Mapping[str, Mapping[str, Sequence[float]]], first_step: int) -> None:
    planners = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = dict(zip(planners, [GREY, *palette(max(1, len(planners) - 1))], strict=False))
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
