"""`toolkit report` and `toolkit compare`; the page in headless Chromium with `make test-browser`."""

import base64
import html
import json
import os
import re
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from bs4 import BeautifulSoup
from PIL import Image

from tests.commands.report.conftest import write_run
from tests.dynamic.eventful import write_lifecycle
from tests.support.browser import browser_page
from tests.support.small_run import small_config, small_trainer
from toolkit.commands import main
from toolkit.commands.report import experts
from toolkit.commands.report.comparison import final_rows
from toolkit.commands.report.curves import curves_by_metric, decimate
from toolkit.commands.report.experts import plots_of
from toolkit.commands.report.processes import process_rows, process_tables
from toolkit.commands.report.records import read_runs
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR


class Page:
    """Tabs, plots, tables, links and loaded resources of a report."""

    def __init__(self, path: Path):
        self.path = path
        self.html = path.read_text(encoding="utf-8")
        page = BeautifulSoup(self.html, "html.parser")
        self.data = html.unescape(page.find("script", type="application/json").string)
        models: list[dict] = []
        json.loads(self.data, object_hook=lambda model: models.append(model) or model)

        def values(kind: str, attribute: str) -> list[str]:
            found = [model["attributes"] for model in models if model.get("name") == kind and "attributes" in model]
            return [attributes.get(attribute, "") for attributes in found]

        texts = BeautifulSoup("".join(values("Div", "text")), "html.parser")
        self.tabs, self.plots = values("TabPanel", "title"), values("Title", "text")
        rows = [table.select("tr") for table in texts.select("table")]
        self.tables = [[[cell.get_text() for cell in row.select("td, th")] for row in table] for table in rows]
        self.links = [link["href"] for link in texts.select("a")]
        self.loaded = [tag for part in (page, texts) for tag in part.select("[src], [srcset], [data], link")]


def page_of(folder: Path, runs: list[Path]) -> Page:
    output = folder / "out" / "report.html"
    assert main(["report", *map(str, runs), "--output", str(output)]) == EXIT_DONE
    return Page(output)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, several: list[Path]) -> Page:
    return page_of(tmp_path_factory.mktemp("report"), several)


def test_report_tables_list_runs_results_events_and_settings(report: Page, several: list[Path]):
    runs, final, processes, events, settings = report.tables
    assert [row[0] for row in runs[1:]] == ["first", "second", "fast", "moving", "not <finished>"]
    assert [row[1] for row in runs[1:]] == ["finished"] * 4 + ["not finished"]
    assert runs[4][-1] == "2 x cpu, Some CPU, 4 cores"
    parts = ["Runs", "Training", "Evaluation", "Mixture of experts", "Run", "Plots", "Events"]
    assert report.tabs == [*parts, "All settings"]
    shown = {row[0]: row[1:] for row in settings[1:]}
    assert shown["lr"] == ["0.1", "0.1", "0.5", "0.1", "0.1"]
    assert shown["seed"] == ["0", "1", "0", "0", "0"]
    assert list(shown)[:3] == ["lr", "seed", "replan.planner"], "settings that differ come first"
    assert shown["optimizer.beta1"] == ["0.9"] * 5
    assert final[0] == ["runs", "number", "test_accuracy", "samples_per_second", "lr", "replan.planner", "world_size"]
    assert ["first, second", "2", "91.00 % (sd 1.41)", "100 (sd 0)", "0.1", "None", "1"] in final
    assert [row[:2] for row in processes[1:]] == [["1", "first, second"], ["2", "moving"]]
    assert [processes] == process_tables(read_runs(several))
    assert ["moving", "20", "migration", "2 experts moved, 3.00 MB"] in events
    assert [row[2] for row in events if row[0] == "not <finished>"] == ["restart"]


def test_report_loads_no_resources_and_links_to_run_files(report: Page):
    assert all(image["src"].startswith("data:image/png;base64,") for image in report.loaded)
    assert "default-src 'none'" in report.html
    assert len(report.html) < 5_000_000
    assert all(not link.startswith(("/", "http", "file")) for link in report.links)
    assert all((report.path.parent / unquote(link)).exists() for link in report.links)
    assert any(link.endswith("moving/metrics.jsonl") for link in report.links)


def test_report_plots_have_a_curve_per_run(report: Page):
    plots = report.plots
    assert plots.index("train/loss") < plots.index("train/accuracy") < plots.index("eval/loss")
    assert "moe/migrated_experts" in plots
    assert "moe/load/block" not in plots, "expert loads have a tab"
    names = ("first", "second", "fast", "moving", "not <finished>")
    assert all(report.data.count(json.dumps(name)) > 4 for name in names), "in the legend and in each plot"


def test_report_embeds_plots_of_finished_and_unfinished_runs(report: Page, tmp_path: Path):
    moved = ["expert_load", "expert_placement", "expert_moves"]
    assert [image["alt"] for image in report.loaded] == [*["expert_load"] * 3, *moved, "expert_load"]
    folder = write_run(tmp_path / "drawn")
    Image.new("RGB", (2, 2)).save(folder / "confusion.png")
    (folder / "secret.png").symlink_to(folder / "results.json")
    (image,) = page_of(tmp_path, [folder]).loaded
    assert image["src"].endswith(base64.b64encode((folder / "confusion.png").read_bytes()).decode())


def test_report_names_plots_that_cannot_be_drawn(tmp_path: Path):
    folder = write_run(tmp_path / "odd")
    (folder / "metrics.jsonl").write_text('{"step": 1, "moe/load/block": 3}\n')
    assert "no plots (" in page_of(tmp_path, [folder]).data


def test_runs_that_differ_in_settings_without_effect_share_a_row(tmp_path: Path):
    one = {"storage": None, "max_restarts": 0, "extend": False, "resume_from": None, "on_nonfinite": "stop"}
    other = {"storage": "s3://b/run", "max_restarts": 3, "extend": True, "resume_from": 4, "on_nonfinite": "skip"}
    runs = [
        write_run(tmp_path / "first", settings=one | {"compile": False}),
        write_run(tmp_path / "second", seed=1, settings=other | {"compile": False}),
        write_run(tmp_path / "compiled", settings=one | {"compile": True}),
    ]
    head, *rows = final_rows(read_runs(runs))
    assert head[:2] == ["runs", "number"]
    assert not set(one) & set(head)
    assert [row[:2] for row in rows] == [["first, second", "2"], ["compiled", "1"]]


def test_report_escapes_html_in_run_names(tmp_path: Path):
    names = ["<!--<script>", "<script><script>alert(1)<script>", "a&amp;b"]
    page = page_of(tmp_path, [write_run(tmp_path / name) for name in names])
    assert [row[0] for row in page.tables[0][1:]] == names
    assert "train/loss" in page.plots


def test_long_curves_are_decimated_with_extremes_and_gaps(tmp_path: Path):
    values = np.sin(np.arange(10_000) / 500).astype(np.float32)
    values[4_321] = 50
    values[7_000:7_400] = np.nan
    kept = decimate(values, 200)
    assert len(kept) <= 200
    assert {0, 4_321, 9_999} <= set(kept.tolist())
    assert np.isnan(values[kept]).any()
    assert (np.diff(kept) > 0).all()
    assert decimate(values, 10_000).tolist() == list(range(10_000))

    folder = write_run(tmp_path / "long", steps=5_000)
    (curve,) = curves_by_metric(read_runs([folder]))["train/loss"]
    assert len(curve.steps) <= 1_000


def test_dynamic_experts_keep_their_uid_in_plots_of_unfinished_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_lifecycle(write_run(tmp_path / "dynamic"))
    (run,) = read_runs([tmp_path / "dynamic"])
    for line in run.lines:
        line["moe/placement/moe"] = [[3, 1], [0, 2]] if line["step"] < 400 else [[3, 1], [0, 2, 4]]
    drawn = []
    monkeypatch.setattr(experts, "draw_experts", lambda _, found, *__: drawn.append(found) or {})
    assert plots_of(run, tmp_path) == []
    (found,) = drawn
    loads = {uid: [step for step, shares in found.loads["moe"] if shares[uid] is not None] for uid in (3, 6)}
    assert loads == {3: list(range(20, 240, 20)), 6: [400]}, "3 merged at step 230, 6 created at 390 with its id"
    assert found.placement == {"moe": [[0, 1, 2, 6, 4]]}
    assert found.moves["moe"][0] == (20, [[3, 1], [0, 2]])
    assert found.moves["moe"][-1] == (400, [[6, 1], [0, 2, 4]])


def test_damaged_run_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good, bad, broken = write_run(tmp_path / "good"), write_run(tmp_path / "bad"), write_run(tmp_path / "broken")
    metrics = bad / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    lines[2] = "{broken\n"
    metrics.write_text("".join(lines) + '{"step": 99')
    (broken / "config.json").write_text("[]")
    text = page_of(tmp_path, [good, bad, broken]).html
    assert "bad: metrics.jsonl: line 3 cannot be read and is left out." in text
    assert "broken: config.json: cannot be read and counts as empty (not a JSON object)." in text
    assert main(["compare", str(good), str(bad)]) == EXIT_DONE
    assert "bad: metrics.jsonl: line 3 cannot be read" in capsys.readouterr().out


def test_irregular_run_files_count_as_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    secrets = tmp_path / "secrets.json"
    secrets.write_text('{"step": 1, "world_size": 1, "word": "hunter2"}\n')
    creators = {"link": lambda path: path.symlink_to(secrets), "pipe": os.mkfifo, "folder": Path.mkdir}
    files = ["config.json", "results.json", "metrics.jsonl", "lifecycle.jsonl"]
    runs = [write_run(tmp_path / kind) for kind in creators]
    for run, name in product(runs, files):
        (run / name).unlink(missing_ok=True)
        creators[run.name](run / name)
    assert main(["compare", *map(str, runs)]) == EXIT_DONE
    printed = capsys.readouterr().out
    for run, name in product(runs, files):
        assert f"{run.name}: {name}: cannot be read and counts as empty (not a regular file)" in printed
    assert "hunter2" not in printed + page_of(tmp_path, runs).html


@pytest.mark.parametrize("command", ["report", "compare"])
def test_invalid_run_folders_raise(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = write_run(tmp_path / "runs" / "good")
    words = [tmp_path / "nowhere", good, tmp_path / "runs", good]
    assert main([command, *map(str, words)]) == EXIT_USER_ERROR
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {tmp_path}/nowhere: no such folder")
    assert second.endswith(f"it has runs inside: {tmp_path}/runs/*.")
    assert third == f"error: {good}: is given twice: give each run once."


def test_report_overwrites_only_reports(tmp_path: Path, several: list[Path], capsys: pytest.CaptureFixture[str]):
    for runs in (several[:1], several[:2]):
        assert len(page_of(tmp_path, runs).tables[0]) == 1 + len(runs)
    metrics = several[0] / "metrics.jsonl"
    before = metrics.read_bytes()
    assert main(["report", str(several[0]), "--output", str(metrics)]) == EXIT_USER_ERROR
    assert f"--output {metrics}: exists and is not a page." in capsys.readouterr().err
    assert metrics.read_bytes() == before


def test_compare_prints_tables_and_json(several: list[Path], capsys: pytest.CaptureFixture[str]):
    assert main(["compare", *map(str, several)]) == EXIT_DONE
    runs, final = capsys.readouterr().out.split("\n\nFinished runs")[0:2]
    assert re.search(r"\| second +\| 0\.1 +\|", runs)
    assert "| first, second | 2      | 91.00 % (sd 1.41) |" in final
    assert len({len(line) for line in runs.splitlines()}) == 1, "aligned columns"
    assert main(["compare", "--json", *map(str, several)]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][1]["settings"]["seed"] == 1
    assert "optimizer.beta1" not in found["runs"][1]["settings"]
    assert {row["runs"]: row["test_accuracy mean"] for row in found["final"]}[2] == pytest.approx(0.91)


def test_report_reads_a_trained_run(tmp_path: Path):
    with small_trainer(small_config(tmp_path / "real")) as trainer:
        trainer.run.finish(trainer.fit())
    page = page_of(tmp_path, [tmp_path / "real"])
    runs, final, _ = page.tables
    assert runs[1][:3] == ["real", "finished", "20"]
    assert "1 x cpu, " in runs[1][-1]
    assert "GiB" in runs[1][-1]
    assert final[0][:2] == ["runs", "number"]
    assert [image["alt"] for image in page.loaded] == ["expert_load"]
    assert read_runs([tmp_path / "real"])[0].notices == []


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


@pytest.mark.browser
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


def write(folder: Path, processes: int, rate: float, off: float = 0.0, seed: int = 0, **settings: Any) -> Path:
    """Write a finished run with `off` added to the loss of step 8."""
    results = {"world_size": processes, "samples_per_second": rate, "test_loss": 0.5 + seed + off}
    run = write_run(folder, seed=seed, settings={"ep_size": None} | settings, results=results)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["train/loss"] += off * (line["step"] == 8)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def scaled(tmp_path: Path) -> list[Path]:
    """Two seeds on one and on four processes, one run with ep_size=2, and one with another learning rate."""
    return [
        write(tmp_path / "four", 4, 320.0, off=1e-6),
        write(tmp_path / "one", 1, 90.0),
        write(tmp_path / "one-b", 1, 110.0, seed=1),
        write(tmp_path / "four-b", 4, 280.0, off=-3e-6, seed=1),
        write(tmp_path / "pairs", 4, 200.0, ep_size=2, num_processes=4, gradient_accumulation_steps=2),
        write(tmp_path / "other", 2, 150.0, lr=0.7),
    ]


def test_runs_are_compared_with_the_smallest_world_size(scaled: list[Path]):
    (rows,) = process_rows(read_runs(scaled))
    assert [(row["processes"], list(row["runs"])) for row in rows] == [
        (1, ["one", "one-b"]),
        (4, ["four", "four-b"]),
        (4, ["pairs"]),
    ]
    assert [row["samples_per_second"] for row in rows] == [100.0, 300.0, 200.0]
    assert [row["speed_up"] for row in rows] == [1.0, 3.0, 2.0]
    assert [row["efficiency"] for row in rows] == [1.0, 0.75, 0.5]
    losses = [row["train_loss_difference"] for row in rows]
    assert losses == pytest.approx([0.0, 3e-6, 0.0], rel=1e-6), "per seed"
    assert [row["test_loss_difference"] for row in rows] == pytest.approx([0.0, 3e-6, 0.0], rel=1e-6)
    assert [row["settings"]["ep_size"] for row in rows] == [None, None, 2]


def test_compare_prints_the_process_table(scaled: list[Path], capsys: pytest.CaptureFixture[str]):
    head, *rows = process_tables(read_runs(scaled))[0]
    assert head[:2] == ["processes", "runs"]
    assert [
        rows[1][head.index(name)]
        for name in ("processes", "runs", "samples/s", "speed-up over 1", "efficiency", "train/loss differs by")
    ] == ["4", "four, four-b", "300", "3.00", "75%", "3e-06"]
    assert main(["compare", *map(str, scaled)]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "The same training on several numbers of processes:" in printed
    assert all(cell in printed for cell in rows[1])
    assert main(["compare", "--json", *map(str, scaled)]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["processes"][0][1]["efficiency"] == 0.75
