"""The page of `toolkit report` in headless Chromium: `make test-browser`."""

from pathlib import Path

import pytest

from tests.commands.report.conftest import write_run
from tests.support.browser import browser_page
from toolkit.commands import main
from toolkit.errors import EXIT_DONE

pytestmark = pytest.mark.browser

ZOOM_FIRST_PLOT = """
() => {
  const [tabs] = Bokeh.documents[0].roots();
  const [, , grid] = tabs.tabs[tabs.active].child.children[0].children;
  const [first, second] = grid.children.map(([plot]) => plot);
  first.x_range.setv({start: 5, end: 9});
  return {
    titles: [first.title.text, second.title.text],
    second_range: [second.x_range.start, second.x_range.end],
    visible: second.renderers.filter(line => line.name).map(line => line.visible),
  };
}
"""


def test_report_page_links_zooms_and_hides_runs_without_console_errors(tmp_path: Path, several: list[Path]):
    output = tmp_path / "report.html"
    named = write_run(tmp_path / "<!--<script>", moves=True)
    assert main(["report", *map(str, several), str(named), "--output", str(output)]) == EXIT_DONE
    with browser_page(viewport={"width": 1400, "height": 2000}) as (page, console):
        page.goto(output.as_uri())
        page.locator(".bk-tab").get_by_text("Training", exact=True).click()
        page.locator(".bk-Legend .bk-item").first.click()
        assert page.evaluate(ZOOM_FIRST_PLOT) == {
            "titles": ["train/loss", "train/accuracy"],
            "second_range": [5, 9],
            "visible": [False, True, True, True, True, True],
        }
    assert [line for line in console if "[bokeh" not in line] == []
