"""The page of `toolkit report`: one HTML file with its data, scripts and styles inside, which needs no network."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from toolkit.commands.report.comparison import differing, final_rows, settings, summary_rows
from toolkit.commands.report.curves import OPEN_AT_FIRST, Curve, curves_by_metric, heading
from toolkit.commands.report.experts import Event, events_of, viewer_data
from toolkit.commands.report.processes import process_notices, process_tables
from toolkit.commands.report.records import RunRecord
from toolkit.errors import UserError
from toolkit.run.tracking.jsonl import to_json
from toolkit.run.tracking.metric_names import is_share
from toolkit.version import __version__

COLOURS = (
    "#4269d0", "#ff725c", "#3ca951", "#efb118", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5", "#9498a0",
)  # fmt: skip
"""Of runs, readable on light and on dark; the eleventh run has the first again, with a broken line."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
INK, GRID = "#78808c", "rgba(128, 136, 148, 0.25)"
"""Of axes: between light and dark, because a canvas does not follow the page's colours."""
FEW_POINTS = 12
"""Curves of so many points, such as those of evaluations, have each marked."""
MOST_FILES = 60
"""Links to files of one run."""


def check_installed() -> None:
    """Raise UserError where Bokeh is missing."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise UserError("toolkit report needs Bokeh, which is missing: pip install 'moe-toolkit[report]'.") from None


def make_page(runs: Sequence[RunRecord], folder: Path) -> str:
    """The page as text, to be written into `folder`, from which links to files lead. Raises UserError without Bokeh."""
    check_installed()
    from bokeh.resources import Resources

    curves = curves_by_metric(runs)
    viewer = viewer_data(runs)
    frame = files("toolkit.commands.report")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return Template(frame.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        made=f"toolkit {__version__}, {time.strftime('%Y-%m-%d %H:%M')}",
        style=frame.joinpath("page.css").read_text(encoding="utf-8"),
        bokeh="\n".join(Resources(mode="inline", components=["bokeh"]).js_raw),
        script=frame.joinpath("page.js").read_text(encoding="utf-8"),
        notices=_notices(runs),
        runs=_table(_linked_runs(runs, folder)),
        final=_table([[html.escape(cell) for cell in row] for row in final_rows(runs)]),
        processes=_processes(runs),
        settings=_settings_table(runs),
        legend="".join(_legend_entry(index, run) for index, run in enumerate(runs)),
        curves="".join(_section(name, list(metrics)) for name, metrics in groupby(curves, heading)),
        decimated=_how_decimated(curves),
        experts="" if viewer else "hidden",
        events=_events_table(runs, events_of(runs)),
        files="".join(_files(run, folder) for run in runs),
        names=_data("runs", [{"name": run.name, "colour": colour(i)} for i, run in enumerate(runs)]),
        plots="".join(_data(f"plot:{name}", _plot(name, found, runs)) for name, found in curves.items()),
        viewer=_data("viewer", viewer) + (_data("heat", _heat_map()) if viewer else ""),
    )


def colour(run: int) -> str:
    return COLOURS[run % len(COLOURS)]


# --- plots -----------------------------------------------------------------------------------------------------------


def _figure(**options: Any) -> Any:
    """An empty figure of Bokeh in the style of the page."""
    from bokeh.models import BasicTickFormatter
    from bokeh.plotting import figure

    plot = figure(
        sizing_mode="stretch_width",
        tools="box_zoom,xpan,xwheel_zoom,reset,save",
        active_drag="box_zoom",
        toolbar_location="above",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.grid.grid_line_color = GRID
    for axis in plot.axis:
        axis.axis_line_color = axis.major_tick_line_color = GRID
        axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.major_label_text_font_size = "11px"
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    return plot


def _plot(name: str, curves: Sequence[Curve], runs: Sequence[RunRecord]) -> Any:
    """A figure with a line per run, and points where a run has few values, as Bokeh's JSON."""
    from bokeh.embed import json_item
    from bokeh.models import BooleanFilter, CDSView, ColumnDataSource, HoverTool, NumeralTickFormatter

    finite = [value for curve in curves for value in curve.values[curve.values == curve.values]]
    log = name.endswith("loss") and bool(finite) and min(finite) > 0 and max(finite) > 10 * min(finite)
    plot = _figure(height=250, y_axis_type="log" if log else "linear")
    if log:
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0000]")
    lines = ColumnDataSource(
        {
            "xs": [curve.steps for curve in curves],
            "ys": [curve.values for curve in curves],
            "index": [curve.run for curve in curves],
            "name": [runs[curve.run].name for curve in curves],
            "colour": [colour(curve.run) for curve in curves],
            "dash": [DASHES[curve.run // len(COLOURS) % len(DASHES)] for curve in curves],
        }
    )
    view = CDSView(filter=BooleanFilter(booleans=[True] * len(curves)))
    drawn = plot.multi_line(
        "xs", "ys", source=lines, view=view, line_color="colour", line_dash="dash", line_width=1.8, line_alpha=0.9
    )
    few = [curve for curve in curves if len(curve.steps) <= FEW_POINTS]
    if few:
        points = [(curve.run, step, value) for curve in few for step, value in zip(*_lists(curve), strict=True)]
        source = ColumnDataSource(
            {
                "index": [run for run, _, _ in points],
                "x": [step for _, step, _ in points],
                "y": [value for _, _, value in points],
                "colour": [colour(run) for run, _, _ in points],
            }
        )
        view = CDSView(filter=BooleanFilter(booleans=[True] * len(points)))
        plot.scatter("x", "y", source=source, view=view, size=5, color="colour")
    value = "@name: $data_y{0.00 %}" if is_share(name) else "@name: $data_y{0.[0000]a}"
    plot.add_tools(
        HoverTool(renderers=[drawn], line_policy="nearest", tooltips=f"{value}<br>step $data_x{{0,0}}", mode="mouse")
    )
    return json_item(plot)


def _heat_map() -> Any:
    """An empty heat map of loads, experts over steps, which the page's script fills in."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool, LinearColorMapper
    from bokeh.models.annotations import Span
    from bokeh.palettes import RdBu11, interp_palette

    plot = _figure(height=300, x_axis_label="step", y_axis_label="logical expert", x_range=(0, 1), y_range=(0, 1))
    plot.grid.grid_line_color = None
    plot.yaxis.ticker.min_interval = 1
    source = ColumnDataSource({name: [] for name in ("x", "y", "w", "share", "end")}, name="loads")
    shares = LinearColorMapper(palette=interp_palette(RdBu11, 64), low=0, high=1, name="shares")
    fill = {"field": "share", "transform": shares}
    plot.rect("x", "y", "w", 1, source=source, fill_color=fill, line_color=None)
    plot.add_tools(HoverTool(tooltips="expert @y: @share{0.00 %}<br>up to step @end{0,0}"))
    for name, width, ink in (("now-border", 4, "#111"), ("now", 2, "#fff")):
        plot.add_layout(Span(location=0, dimension="height", line_color=ink, line_width=width, name=name))
    return json_item(plot)


def _lists(curve: Curve) -> tuple[list[int], list[float]]:
    return curve.steps.tolist(), curve.values.tolist()


# --- tables ----------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A head and rows, whose cells are HTML, as a table."""
    head, *body = rows
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table>{''.join(lines)}</table>" if body else "<p>None is finished yet.</p>"


def _linked_runs(runs: Sequence[RunRecord], folder: Path) -> list[list[str]]:
    head, *rows = ([html.escape(cell) for cell in row] for row in summary_rows(runs))
    for run, row in zip(runs, rows, strict=True):
        row[0] = _link(run.folder, row[0], folder)
    return [head, *rows]


def _settings_table(runs: Sequence[RunRecord]) -> str:
    """All settings, a column per run; those in which no run differs are hidden at first."""
    found = [settings(run) for run in runs]
    differ = set(differing(runs))
    names = dict.fromkeys(name for values in found for name in values)
    lines = ["<tr><th>setting</th>" + "".join(f"<th>{html.escape(run.name)}</th>" for run in runs) + "</tr>"]
    for name in sorted(names, key=lambda name: name not in differ):
        cells = "".join(f"<td>{html.escape(str(values.get(name, '')))}</td>" for values in found)
        kind = "" if name in differ else ' class="same"'
        lines.append(f"<tr{kind}><td>{html.escape(name)}</td>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _events_table(runs: Sequence[RunRecord], events: Iterable[Event]) -> str:
    lines = ["<tr><th>run</th><th>step</th><th>event</th><th></th></tr>"]
    for event in events:
        step = "" if event.step is None else f"{event.step:,}"
        place = "" if event.step is None else f' data-run="{event.run}" data-step="{event.step}"'
        words = (runs[event.run].name, step, event.kind, event.text)
        lines.append(f"<tr{place}>" + "".join(f"<td>{html.escape(word)}</td>" for word in words) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


# --- other parts -----------------------------------------------------------------------------------------------------


def _notices(runs: Sequence[RunRecord]) -> str:
    told = [f"<li>{html.escape(run.name)}: {html.escape(notice)}</li>" for run in runs for notice in run.notices]
    return f'<ul class="notices">{"".join(told)}</ul>' if told else ""


def _processes(runs: Sequence[RunRecord]) -> str:
    """The section that compares numbers of processes; empty where all runs have one."""
    tables = [_table([[html.escape(cell) for cell in row] for row in table]) for table in process_tables(runs)]
    notices = "".join(f"<p>{html.escape(notice)}</p>" for notice in process_notices(runs))
    if not tables and not notices:
        return ""
    words = (
        "Runs that learn the same. Efficiency is the speed-up divided by how many times as many processes there are; "
        "losses are compared step by step, and for runs of one seed."
    )
    wide = f'<div class="wide">{"".join(tables)}</div>'
    return f"<section><h2>Numbers of processes</h2>\n<p>{words}</p>{notices}\n{wide}</section>"


def _legend_entry(index: int, run: RunRecord) -> str:
    style = "solid" if index < len(COLOURS) else "dashed"
    mark = f'<i style="border-top: 3px {style} {colour(index)}"></i>'
    return f'<label><input type="checkbox" checked data-run="{index}">{mark}{html.escape(run.name)}</label>'


def _section(title: str, metrics: Sequence[str]) -> str:
    plots = "".join(
        f'<figure><figcaption>{html.escape(name)}</figcaption><div class="plot" data-plot="{html.escape(name)}"></div>'
        "</figure>"
        for name in metrics
    )
    is_open = " open" if title in OPEN_AT_FIRST else ""
    count = f"{len(metrics)} metric" + ("s" if len(metrics) > 1 else "")
    return f"<details{is_open}><summary>{html.escape(title)} <small>{count}</small></summary>" + (
        f'<div class="plots">{plots}</div></details>'
    )


def _how_decimated(curves: dict[str, list[Curve]]) -> str:
    cut = [curve for found in curves.values() for curve in found if curve.decimated_from]
    if not cut:
        return "Curves have all points of metrics.jsonl."
    most = max(curve.decimated_from or 0 for curve in cut)
    return (
        f"{len(cut)} curves have at most {max(len(curve.steps) for curve in cut):,} of up to {most:,} points: "
        "the least and the greatest value of even parts. metrics.jsonl has all."
    )


def _files(run: RunRecord, folder: Path) -> str:
    """Links to what the folder of `run` holds."""
    names = sorted(path for path in run.folder.iterdir() if not path.name.startswith("."))
    links = ", ".join(_link(path, html.escape(path.name), folder) for path in names[:MOST_FILES])
    more = f", and {len(names) - MOST_FILES} more" if len(names) > MOST_FILES else ""
    return f"<p><b>{html.escape(run.name)}</b> {links}{more}</p>"


def _link(target: Path, text: str, folder: Path) -> str:
    """A link that goes on working where the page and the runs are moved together."""
    way = quote(Path(os.path.relpath(target.resolve(), folder.resolve())).as_posix())
    return f'<a href="{html.escape(way)}{"/" if target.is_dir() else ""}">{text}</a>'


def _data(name: str, value: Any) -> str:
    """`value` for the page's script, under `name`."""
    text = (value if isinstance(value, str) else to_json(value)).replace("</", "<\\/")
    return f'<script type="application/json" data-name="{html.escape(name)}">{text}</script>\n'
