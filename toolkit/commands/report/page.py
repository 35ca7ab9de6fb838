"""`toolkit report`: runs side by side on one page that opens in a browser without a network."""

from __future__ import annotations

import base64
import html
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from toolkit.commands.report.comparison import differing, final_rows, settings, summary_rows
from toolkit.commands.report.curves import Curve, curves_by_metric, heading
from toolkit.commands.report.experts import event_rows, plots_of
from toolkit.commands.report.processes import process_notices, process_tables
from toolkit.commands.report.records import RunRecord, readable_runs
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, one_line
from toolkit.run.arguments import Parser
from toolkit.run.folder import write_text
from toolkit.run.tracking.metric_names import is_share
from toolkit.version import __version__

if TYPE_CHECKING:
    from bokeh.models import Range1d
    from bokeh.models.renderers import GlyphRenderer
    from bokeh.models.ui import UIElement
    from bokeh.models.widgets import Div

TEMPLATE = """
{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="
  default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:">
{% endblock %}
"""
DRAW = """
const place = cb_obj.tabs[cb_obj.active].child;
if (place.tags.length) {
  place.children = place.tags;
  place.tags = [];
}
"""
"""Callback that draws an opened tab."""
STYLE = """
:host { font: 14px/1.5 system-ui, sans-serif; padding: 0.5rem; max-width: 95vw; overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; border-bottom: 1px solid #dfe3e8; white-space: nowrap; }
img { max-width: min(100%, 60rem); vertical-align: top; }
"""
"""CSS of tables and plots."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
"""Line styles: after ten runs, colours repeat with the next style."""
FEW_POINTS = 12
"""Curves with at most this number of points, such as evaluations, have markers."""
COLUMNS, LEGEND_COLUMNS = 3, 5
"""Plots per row, and runs per row of the legend."""
FINAL_NUMBERS = (
    "Finished runs. Those that differ in their seed alone are one row: mean, and standard deviation of a sample."
)
NUMBERS_OF_PROCESSES = (
    "Runs that learn the same. Efficiency is the speed-up divided by how many times as many processes there are; "
    "losses are compared step by step, and for runs of one seed."
)
MOST_FILES = 60
"""Maximum links to files of one run."""


def main(argv: Sequence[str]) -> int:
    """Return 0 if the page is written, 2 for bad input, with an error for each folder without a run."""
    parser = Parser("toolkit report", __doc__)
    parser.add_argument("run", nargs="+", type=Path, help="the folder of a run, finished or not")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (report.html)")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("bokeh") is None:
        raise UserError("toolkit report: Bokeh is missing. Run pip install 'moe-toolkit[report]'.")
    runs = readable_runs(args.run)
    if runs is None:
        return EXIT_USER_ERROR
    if args.output.is_file() and not _is_page(args.output):
        raise UserError(f"--output {args.output}: exists and is not a page. Choose another, or remove it.")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.output, make_page(runs, args.output.parent))
    size = args.output.stat().st_size
    sys.stdout.write(f"{args.output}: {len(runs)} run(s), {size / 1e6:.1f} MB; open it in a browser.\n")
    return EXIT_DONE


def _is_page(path: Path) -> bool:
    """Return whether a file is empty or begins like the pages of this command."""
    with path.open("rb") as file:
        begin = file.read(64).strip().lower()
    return not begin or begin.startswith(b"<!doctype html")


def make_page(runs: Sequence[RunRecord], folder: Path) -> str:
    """Return the page as HTML in Bokeh's layout. Links to files are relative to `folder`."""
    from bokeh.embed import file_html
    from bokeh.models import Column, CustomJS, Range1d, Spacer, TabPanel, Tabs
    from bokeh.resources import INLINE

    curves = curves_by_metric(runs)
    steps = Range1d(start=0, end=max(run.step for run in runs) or 1)
    tabs: dict[str, UIElement] = {"Runs": _text(_overview(runs, folder))}
    for title, metrics in groupby(curves, heading):
        tabs[title] = _curves({name: curves[name] for name in metrics}, runs, steps)
    tabs["Plots"] = _text(_plots(runs))
    tabs["Events"] = _text(_table(event_rows(runs)))
    tabs["All settings"] = _text(_table(_settings(runs)))
    first, *others = tabs
    panels = [TabPanel(title=first, child=tabs[first])]
    # Contents of the other tabs wait in their tags, which Bokeh does not draw.
    panels += [
        TabPanel(title=title, child=Column(children=[Spacer()], tags=[tabs[title]], sizing_mode="stretch_width"))
        for title in others
    ]
    page = Tabs(tabs=panels, sizing_mode="stretch_width")
    page.js_on_change("active", CustomJS(code=DRAW))
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return file_html(page, INLINE, title, template=TEMPLATE)


# --- curves and plots ------------------------------------------------------------------------------------------------


def _figure(title: str, **options: Any) -> Any:
    """Return an empty Bokeh figure over steps."""
    from bokeh.models import BasicTickFormatter
    from bokeh.plotting import figure

    tools = "box_zoom,xpan,xwheel_zoom,reset,save"
    plot = figure(title=title, sizing_mode="stretch_width", tools=tools, active_drag="box_zoom", **options)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    return plot


def _curves(curves: Mapping[str, Sequence[Curve]], runs: Sequence[RunRecord], steps: Range1d) -> UIElement:
    """Plot each metric. Zoom and hidden runs apply to all plots."""
    from bokeh.layouts import column, gridplot
    from bokeh.models.annotations import Legend, LegendItem
    from bokeh.palettes import Category10_10

    styles = [
        {"line_color": Category10_10[index % 10], "line_dash": DASHES[index // 10 % len(DASHES)], "line_width": 1.8}
        for index in range(len(runs))
    ]
    rows = -(-len(runs) // LEGEND_COLUMNS)
    legend = _figure("", height=40 + 24 * rows, x_range=(0, 1), y_range=(0, 1), toolbar_location=None)
    legend.axis.visible = legend.grid.visible = False
    legend.outline_line_color = None
    lines = [[legend.line([2], [2], **style)] for style in styles]  # out of sight, for the legend to show
    plots = [_plot(name, found, runs, steps, styles, lines) for name, found in curves.items()]
    items = [LegendItem(label=run.name, renderers=drawn) for run, drawn in zip(runs, lines, strict=True)]
    legend.add_layout(
        Legend(items=items, click_policy="hide", orientation="horizontal", ncols=LEGEND_COLUMNS, location="top_left")
    )
    words = (
        "Drag to zoom into all curves at once; click on a run to hide it. Long curves have the least and the greatest "
        "value of even parts; metrics.jsonl has all points."
    )
    grid = gridplot(plots, ncols=COLUMNS, sizing_mode="stretch_width", toolbar_location=None)
    return column(_text(f"<p>{words}</p>"), legend, grid, sizing_mode="stretch_width")


def _plot(
    name: str,
    curves: Sequence[Curve],
    runs: Sequence[RunRecord],
    steps: Range1d,
    styles: Sequence[Mapping[str, Any]],
    lines: Sequence[list[GlyphRenderer[Any]]],
) -> Any:
    """Plot one metric: a line per run, added to `lines` of the run, with markers if a run has few values."""
    from bokeh.models import HoverTool, NumeralTickFormatter

    finite = [value for curve in curves for value in curve.values[curve.values == curve.values]]
    log = name.endswith("loss") and bool(finite) and min(finite) > 0 and max(finite) > 10 * min(finite)
    plot = _figure(name, height=250, x_range=steps, y_axis_type="log" if log else "linear", toolbar_location="above")
    if log:
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0000]")
    value = "$name: @y{0.00 %}" if is_share(name) else "$name: @y{0.[0000]a}"
    hovered = []
    for curve in curves:
        style = styles[curve.run]
        line = plot.line(curve.steps, curve.values, name=runs[curve.run].name, **style)
        lines[curve.run].append(line)
        hovered.append(line)
        if len(curve.steps) <= FEW_POINTS:
            lines[curve.run].append(plot.scatter(curve.steps, curve.values, size=5, color=style["line_color"]))
    plot.add_tools(HoverTool(renderers=hovered, line_policy="nearest", tooltips=f"{value}<br>step @x{{0,0}}"))
    return plot


def _plots(runs: Sequence[RunRecord]) -> str:
    """Return the plots of the runs, embedded in HTML."""
    parts = []
    for run in runs:
        parts.append(f"<h2>{html.escape(run.name)}</h2>")
        with tempfile.TemporaryDirectory() as folder:
            try:
                plots = plots_of(run, Path(folder))
            except Exception as error:  # values of a damaged file can be anything
                parts.append(f"<p>no plots ({html.escape(one_line(error))})</p>")
                continue
            for path in plots:
                content = base64.b64encode(path.read_bytes()).decode()
                parts.append(f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{content}">')
    return "\n".join(parts)


# --- tables ----------------------------------------------------------------------------------------------------------


def _text(words: str) -> Div:
    """Return HTML as a page element."""
    from bokeh.models import InlineStyleSheet
    from bokeh.models.widgets import Div

    return Div(text=words, stylesheets=[InlineStyleSheet(css=STYLE)], sizing_mode="stretch_width")


def _table(rows: Sequence[Sequence[str]], links: Sequence[str] = ()) -> str:
    """Return an HTML table from a header and rows; the first cell of each row links to the item of `links`."""
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    for row, link in zip(body, links, strict=False):
        row[0] = f'<a href="{link}">{row[0]}</a>'
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table>{''.join(lines)}</table>" if body else "<p>None is finished yet.</p>"


def _overview(runs: Sequence[RunRecord], folder: Path) -> str:
    """Return the output of `compare` with links to the runs' files."""
    notices = [f"{run.name}: {notice}" for run in runs for notice in run.notices]
    parts = [f"<p>toolkit {__version__}, {time.strftime('%Y-%m-%d %H:%M')}</p>"]
    parts += [f"<p><b>{html.escape(notice)}</b></p>" for notice in [*notices, *process_notices(runs)]]
    parts += [
        "<h2>Runs</h2>",
        _table(summary_rows(runs), [_address(run.folder, folder) for run in runs]),
    ]
    parts += ["<h2>Final numbers</h2>", f"<p>{FINAL_NUMBERS}</p>", _table(final_rows(runs))]
    if tables := process_tables(runs):
        parts += ["<h2>Numbers of processes</h2>", f"<p>{NUMBERS_OF_PROCESSES}</p>", *map(_table, tables)]
    parts += ["<h2>Files</h2>", *(_files(run, folder) for run in runs)]
    return "\n".join(parts)


def _settings(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return all settings, one column per run; settings that differ come first."""
    found = [settings(run) for run in runs]
    differ = set(differing(runs))
    names = sorted(dict.fromkeys(name for values in found for name in values), key=lambda name: name not in differ)
    rows = [[name, *(str(values.get(name, "")) for values in found)] for name in names]
    return [["setting", *(run.name for run in runs)], *rows]


def _files(run: RunRecord, folder: Path) -> str:
    """Return links to the files of `run`."""
    paths = sorted(path for path in run.folder.iterdir() if not path.name.startswith("."))
    links = [f'<a href="{_address(path, folder)}">{html.escape(path.name)}</a>' for path in paths[:MOST_FILES]]
    more = f", and {len(paths) - MOST_FILES} more" if len(paths) > MOST_FILES else ""
    return f"<p><b>{html.escape(run.name)}</b> {', '.join(links)}{more}</p>"


def _address(target: Path, folder: Path) -> str:
    """Return a relative link, which stays valid if the page and the runs are moved together."""
    way = quote(Path(os.path.relpath(target.resolve(), folder.resolve())).as_posix())
    return html.escape(way) + ("/" if target.is_dir() else "")
