"""The page of `toolkit report` in headless Chromium: `make test-browser`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.report.chromium import Tab, chromium
from toolkit.commands import main
from toolkit.errors import EXIT_DONE

pytestmark = pytest.mark.browser

DRAWN = """
new Promise(done => {
  const wait = () => waiting || !heat || drawn.length < least ? setTimeout(wait, 50) : done(drawn.length);
  wait();
})
"""
READER = """
(() => {
  const found = {};
  const [first, second] = drawn;
  first.x_range.setv({start: 5, end: 9});
  found.linked = [second.x_range.start, second.x_range.end];
  document.querySelector(".legend input").click();
  found.shown = first.renderers[0].view.filter.booleans;
  document.querySelector('tr[data-run="3"][data-step="20"]').click();
  found.at = document.getElementById("at").value;
  const ranks = () => [...document.querySelectorAll(".rank")].map(rank =>
    [...rank.querySelectorAll(".chip")].map(chip => chip.textContent + (chip.matches(".moved") ? "!" : "")));
  found.after = ranks();
  document.getElementById("step").value = 0;
  document.getElementById("step").dispatchEvent(new Event("input"));
  found.before = ranks();
  return found;
})()
"""
"""Does with the page what a reader does."""


def wait_for_plots(tab: Tab, least: int) -> int:
    """The number of plots that were drawn, once there are `least` and none is being drawn."""
    return tab.run(DRAWN.replace("least", str(least)))


def test_plots_legend_zoom_and_slider_work_without_an_error_in_the_console(tmp_path: Path, several: list[Path]):
    page = tmp_path / "report.html"
    assert main(["report", *map(str, several), "--output", str(page)]) == EXIT_DONE
    with chromium(tmp_path / "profile") as tab:
        tab.show("light", 1400, 5000)
        tab.open(page)
        assert wait_for_plots(tab, 1) == 4, "the groups that are open: loss and accuracy of training and of evaluation"
        paper = "getComputedStyle(document.body).backgroundColor"
        light = tab.run(paper)
        tab.show("dark", 1400, 5000)
        assert light == "rgb(255, 255, 255)"
        assert tab.run(paper) == "rgb(21, 24, 29)"
        assert tab.run(READER) == {
            "linked": [5, 9],
            "shown": [False, True, True, True, True],
            "at": "20",
            "after": [["0", "3!"], ["2", "1!"]],
            "before": [["0", "1"], ["2", "3"]],
        }
        tab.run("document.querySelectorAll('details').forEach(found => { found.open = true; })")
        assert wait_for_plots(tab, 5) > 4, "a group is drawn when it is opened"
    assert [line for line in tab.console if "setting log level" not in line] == []
