"""The page of `toolkit report` in headless Chromium: `make test-browser`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.report.chromium import chromium
from tests.commands.report.conftest import write_run
from toolkit.commands import main
from toolkit.errors import EXIT_DONE

pytestmark = pytest.mark.browser

READER = """
(() => {
  const [tabs] = Bokeh.documents[0].roots();
  const [, legend, grid] = tabs.tabs[tabs.active].child.children[0].children;
  const [first, second] = grid.children.map(([plot]) => plot);
  first.x_range.setv({start: 5, end: 9});
  const [names] = legend.center.filter(part => part.type === "Legend");
  Bokeh.index.find_one(names).shadow_el.querySelector(".bk-item").dispatchEvent(new Event("pointerdown"));
  return {
    plots: [first.title.text, second.title.text],
    linked: [second.x_range.start, second.x_range.end],
    shown: second.renderers.filter(line => line.name).map(line => line.visible),
  };
})()
"""
"""Does with the page what a reader does: the first run is hidden, and a zoom holds for all plots."""


def test_plots_legend_and_zoom_work_without_an_error_in_the_console(tmp_path: Path, several: list[Path]):
    page = tmp_path / "report.html"
    named = write_run(tmp_path / "<!--<script>", moves=True)
    assert main(["report", *map(str, several), str(named), "--output", str(page)]) == EXIT_DONE
    with chromium(tmp_path / "profile") as tab:
        tab.show("light", 1400, 2000)
        tab.open(page)
        tab.wait_until_drawn()
        tab.choose("Training")
        assert tab.run(READER) == {
            "plots": ["train/loss", "train/accuracy"],
            "linked": [5, 9],
            "shown": [False, True, True, True, True, True],
        }
    assert [line for line in tab.console if "[bokeh" not in line] == []
