"""`toolkit report` and `toolkit compare`: what they read, what they compare, and what they refuse."""

from __future__ import annotations

import html
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from tests.commands.report.conftest import write_run
from tests.dynamic.eventful import write_lifecycle
from tests.support.small_run import small_config, small_trainer
from toolkit.commands import main
from toolkit.commands.report import experts
from toolkit.commands.report.comparison import final_rows
from toolkit.commands.report.curves import curves_by_metric, decimate
from toolkit.commands.report.experts import layers_of, placements_of
from toolkit.commands.report.records import read_runs
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR


class Page(HTMLParser):
    """What the data of a page have: tabs, tables as rows of text, links, plots; and what a browser would load."""

    def __init__(self, path: Path):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.links: list[str] = []
        self.plots: list[str] = []
        self.tabs: list[str] = []
        self.loaded: list[str] = []
        self._cell = False
        page = path.read_text(encoding="utf-8")
        (data,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
        self.text = html.unescape(data)
        self.feed(page.replace(data, ""))
        self._gather(json.loads(self.text))

    def _gather(self, value: Any) -> None:
        """Note every tab, plot and text below `value`."""
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, dict | list):
                self._gather(part)
        found = value.get("attributes", {}) if isinstance(value, dict) else {}
        if found and value["name"] == "Div":
            self.feed(found["text"])
        elif found and value["name"] == "TabPanel":
            self.tabs.append(found["title"])
        elif found and value["name"] == "Title":
            self.plots.append(found.get("text", ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._cell = tag in ("td", "th") or (self._cell and tag == "a")
        self.loaded += [f"{tag} {values[name]}" for name in ("src", "srcset", "data") if values.get(name)]
        if tag == "link":
            self.loaded.append(f"link {values.get('href')}")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "a":
            self.links.append(values["href"] or "")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "table"):
            self._cell = False

    def handle_data(self, text: str) -> None:
        if self._cell:
            self.tables[-1][-1][-1] += text


def page_of(folder: Path, runs: list[Path]) -> Page:
    output = folder / "out" / "report.html"
    assert main(["report", *map(str, runs), "--output", str(output)]) == EXIT_DONE
    return Page(output)


def test_the_page_holds_what_runs_differ_in_and_came_to(tmp_path: Path, several: list[Path]):
    page = page_of(tmp_path, several)
    runs, final, processes, events, settings = page.tables
    assert [row[0] for row in runs[1:]] == ["first", "second", "fast", "moving", "goes <on>"]
    assert [row[1] for row in runs[1:]] == ["finished"] * 4 + ["not finished"]
    assert runs[4][-1] == "2 x cpu, Some CPU, 4 cores"
    parts = ["Runs", "Training", "Evaluation", "Mixture of experts", "Run", "Expert load and placement", "Events"]
    assert page.tabs == [*parts, "All settings"]
    shown = {row[0]: row[1:] for row in settings[1:]}
    assert shown["lr"] == ["0.1", "0.1", "0.5", "0.1", "0.1"]
    assert shown["seed"] == ["0", "1", "0", "0", "0"]
    assert list(shown)[:3] == ["lr", "seed", "replan.planner"], "those in which runs differ come first"
    assert shown["optimizer.beta1"] == ["0.9"] * 5
    assert final[0] == ["runs", "number", "test_accuracy", "samples_per_second", "lr", "replan.planner", "world_size"]
    seeds = ["first, second", "2", "91.00 % (sd 1.41)", "100 (sd 0)", "0.1", "None", "1"]
    assert seeds in final, "of 0.90 and 0.92"
    assert [row[:2] for row in processes[1:]] == [["1", "first, second"], ["2", "moving"]]
    assert ["moving", "20", "migration", "2 experts moved, 3.00 MB"] in events
    assert [row[2] for row in events if row[0] == "goes <on>"] == ["restart"]


def test_runs_that_differ_in_what_decides_neither_learning_nor_speed_are_seeds_of_one(tmp_path: Path):
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


def test_the_page_needs_no_network_and_its_links_lead_to_the_files(tmp_path: Path, several: list[Path]):
    page = page_of(tmp_path, several)
    assert page.loaded == []
    text = (tmp_path / "out" / "report.html").read_text()
    assert "default-src 'none'" in text
    assert (tmp_path / "out" / "report.html").stat().st_size < 5_000_000
    assert page.links
    assert all(not link.startswith(("/", "http", "file")) for link in page.links)
    assert all((tmp_path / "out" / unquote(link)).exists() for link in page.links)
    assert any(link.endswith("moving/metrics.jsonl") for link in page.links)


def test_curves_of_all_runs_are_in_one_plot(tmp_path: Path, several: list[Path]):
    page = page_of(tmp_path, several)
    assert page.plots.index("train/loss") < page.plots.index("train/accuracy") < page.plots.index("eval/loss")
    assert "moe/migrated_experts" in page.plots
    assert "moe/load/block" not in page.plots, "loads are in the part on experts"
    names = ("first", "second", "fast", "moving", "goes <on>")
    assert all(page.text.count(json.dumps(name)) > 4 for name in names), "in the legend and in each plot"
    assert [title for title in page.plots if title.startswith("moving, block: ")] == [
        "moving, block: load (white: a fair share)",
        "moving, block: rank (first of replicas)",
    ]


@pytest.mark.parametrize("name", ["<!--<script>", "</script><script>alert(1)</script>", "a&amp;b"])
def test_a_name_that_looks_like_html_is_shown_as_it_is(tmp_path: Path, name: str):
    page = page_of(tmp_path, [write_run(tmp_path / name.replace("/", "")), write_run(tmp_path / "other")])
    assert page.tables[0][1][0] == name.replace("/", "")
    assert "train/loss" in page.plots


def test_long_curves_keep_their_spikes_and_the_page_says_so(tmp_path: Path):
    values = np.sin(np.arange(10_000) / 500).astype(np.float32)
    values[4_321] = 50
    values[7_000:7_400] = np.nan
    kept = decimate(values, 200)
    assert len(kept) <= 200
    assert {0, 4_321, 9_999} <= set(kept.tolist())
    assert np.isnan(values[kept]).any(), "a gap stays a gap"
    assert (np.diff(kept) > 0).all()
    assert decimate(values, 10_000).tolist() == list(range(10_000))

    folder = write_run(tmp_path / "long", steps=5_000)
    (curve,) = curves_by_metric(read_runs([folder]))["train/loss"]
    assert curve.decimated_from == 2_500
    page_of(tmp_path, [folder])
    assert "curves have at most" in (tmp_path / "out" / "report.html").read_text()


def test_loads_are_means_over_the_lines_of_a_column_and_placements_come_from_the_lines(
    several: list[Path], monkeypatch: pytest.MonkeyPatch
):
    moving = read_runs(several)[3]
    assert placements_of(moving, "block") == [(2, [[0, 1], [2, 3]]), (20, [[0, 3], [2, 1]])]
    moving.lines[0]["moe/load/block"][:] = [0.8, 0.2, 0.0, 0.0]  # at step 2; a column has four lines
    for name in ("MOST_COLUMNS", "FEWEST_COLUMNS"):
        monkeypatch.setattr(experts, name, 5)
    (layer,) = layers_of([moving])
    assert (layer.name, layer.load_steps) == ("block", [0, 8, 16, 24, 32, 40])
    expected = np.tile([[0.4], [0.3], [0.2], [0.1]], (1, 5))
    expected[:, 0] = [0.5, 0.275, 0.15, 0.075]
    assert layer.shares_ET == pytest.approx(expected)
    assert layer.placement_steps == [0, 20, 40]
    assert layer.ranks_EP.tolist() == [[0, 0], [0, 1], [1, 1], [1, 0]]


def test_load_plot_of_unevenly_spaced_log_steps_begins_with_the_first_load(several: list[Path]):
    moving = read_runs(several)[3]
    for line in moving.lines:
        line["step"] += 100
    (layer,) = layers_of([moving])
    assert layer.load_steps[:3] == [0, 102, 104]
    assert layer.shares_ET[:, 0] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert layer.placement_steps == [0, 120, 140]


def test_dynamic_experts_keep_their_number_on_the_page(tmp_path: Path):
    write_lifecycle(write_run(tmp_path / "dynamic"))
    (run,) = read_runs([tmp_path / "dynamic"])
    (layer,) = layers_of([run])
    steps = [np.array(layer.load_steps[1:])[shares_T > 0] for shares_T in layer.shares_ET]
    assert steps[3].tolist() == list(range(20, 240, 20)), "which was merged away after step 230"
    assert steps[6].tolist() == [400], "which got the logical id of 3 after step 390"
    assert placements_of(run, "moe")[-1] == (400, [[0, 1, 2, 6, 4]])
    run.lines[0]["moe/placement/moe"] = [[3, 1], [0, 2]]
    run.lines[-1]["moe/placement/moe"] = [[3, 1], [0, 2, 4]]
    assert (20, [[3, 1], [0, 2]]) in placements_of(run, "moe")
    assert (400, [[6, 1], [0, 2, 4]]) in placements_of(run, "moe")


def test_damaged_files_are_shown_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good, bad, broken = write_run(tmp_path / "good"), write_run(tmp_path / "bad"), write_run(tmp_path / "broken")
    metrics = bad / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    lines[2] = "{what\n"
    metrics.write_text("".join(lines) + '{"step": 99')
    (broken / "config.json").write_text("[]")
    page_of(tmp_path, [good, bad, broken])
    text = (tmp_path / "out" / "report.html").read_text()
    assert "bad: metrics.jsonl: line 3 cannot be read and is left out." in text
    assert "broken: config.json: cannot be read and counts as empty (not a JSON object)." in text
    assert main(["compare", str(good), str(bad)]) == EXIT_DONE
    assert "bad: metrics.jsonl: line 3 cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_run_files_that_are_not_regular_files_count_as_empty(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path / "run")
    (tmp_path / "secrets.json").write_text('{"step": 1, "world_size": 1, "word": "hunter2"}\n')
    files = ["config.json", "results.json", "metrics.jsonl", "lifecycle.jsonl"]
    for name in files:
        (run / name).unlink(missing_ok=True)
        if kind == "link":
            (run / name).symlink_to(tmp_path / "secrets.json")
        else:
            os.mkfifo(run / name) if kind == "pipe" else (run / name).mkdir()
    assert main(["compare", str(run)]) == EXIT_DONE
    said = capsys.readouterr().out
    notices = [f"run: {name}: cannot be read and counts as empty (not a regular file)" for name in files]
    assert [notice for notice in notices if notice not in said] == []
    page_of(tmp_path, [run])
    assert "hunter2" not in said + (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("command", ["report", "compare"])
def test_folders_without_a_run_cost_a_line_each(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = write_run(tmp_path / "runs" / "good")
    words = [tmp_path / "nowhere", good, tmp_path / "runs", good]
    assert main([command, *map(str, words)]) == EXIT_USER_ERROR
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {tmp_path}/nowhere: no such folder")
    assert second.endswith(f"it has runs inside: {tmp_path}/runs/*.")
    assert third == f"error: {good}: is given twice: give each run once."


def test_a_page_replaces_a_page_and_no_other_file(
    tmp_path: Path, several: list[Path], capsys: pytest.CaptureFixture[str]
):
    assert page_of(tmp_path, several).tables
    assert page_of(tmp_path, several[:2]).tables
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
    assert len({len(line) for line in runs.splitlines()}) == 1, "columns stand below each other"
    assert main(["compare", "--json", *map(str, several)]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][1]["settings"]["seed"] == 1
    assert "optimizer.beta1" not in found["runs"][1]["settings"]
    assert {row["runs"]: row["test_accuracy mean"] for row in found["final"]}[2] == pytest.approx(0.91)


def test_a_run_as_the_trainer_leaves_it_can_be_read(tmp_path: Path):
    with small_trainer(small_config(tmp_path / "real")) as trainer:
        trainer.run.finish(trainer.fit())
    page = page_of(tmp_path, [tmp_path / "real"])
    runs, final, _ = page.tables
    assert runs[1][:3] == ["real", "finished", "20"]
    assert "1 x cpu, " in runs[1][-1]
    assert "GiB" in runs[1][-1]
    assert final[0][:2] == ["runs", "number"]
    assert [layer.shares_ET.shape[0] for layer in layers_of(read_runs([tmp_path / "real"]))] == [4]
    assert read_runs([tmp_path / "real"])[0].notices == []
