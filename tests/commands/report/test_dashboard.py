"""`toolkit dashboard wandb`: sections, panels and metric names of the workspace."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.processes import run_distributed
from recipes import mnist_moe
from tests.commands.report.conftest import write_run
from toolkit.commands import main
from toolkit.commands.report.dashboard import USUAL
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.run.tracking.guard import expand
from toolkit.run.tracking.jsonl import read_metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run on two processes with a planner, and a run with dynamic experts."""
    folder = tmp_path_factory.mktemp("runs")
    options: Any = {"tracker": "none", "cpu": True, "max_steps": 10, "log_every": 5, "dataset": "digits"}
    replan = ReplanOptions(planner="swap", every=5, guarded=False)
    planned = mnist_moe.debug().replace(**options, replan=replan, run_dir=folder / "planned")
    dynamic = mnist_moe.debug().replace(**options, max_experts=8, run_dir=folder / "dynamic")
    run_distributed(mnist_moe.main, 2, planned)
    mnist_moe.main(dynamic)
    return [planned.run_dir, dynamic.run_dir]


def sections(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, list[dict[str, Any]]]:
    """Return the panel configurations of each section that `--dry-run` prints."""
    pytest.importorskip("wandb_workspaces.workspaces")
    capsys.readouterr()
    assert main(["dashboard", "wandb", *map(str, words), "--dry-run"]) == EXIT_DONE
    view = json.loads(capsys.readouterr().out)
    bank = view["section"]["panelBankConfig"]["sections"]
    opened = {"Training", "Evaluation", "Mixture of experts", "Pictures"}
    assert {section["name"] for section in bank if section["isOpen"]} == opened & {section["name"] for section in bank}
    return {section["name"]: [panel["config"] for panel in section["panels"]] for section in bank}


def logged_names(run: Path) -> set[str]:
    """Return the metric names as trackers receive them, with one name per expert load."""
    return {name for line in read_metrics(run / "metrics.jsonl") for name in expand(line)}


def shown(found: dict[str, list[dict[str, Any]]]) -> tuple[set[str], set[str]]:
    """Return the metric names and the metric patterns of all panels."""
    panels = [panel for panels in found.values() for panel in panels]
    names = {name for panel in panels for name in panel.get("metrics", [])}
    return names, {panel["metricRegex"] for panel in panels if panel.get("useMetricRegex")}


def matching(pattern: str, names: set[str]) -> set[str]:
    return {name for name in names if re.search(pattern, name)}


def test_project_panels_show_logged_metrics(runs: list[Path], capsys: pytest.CaptureFixture[str]):
    logged = logged_names(runs[0]) | logged_names(runs[1])
    names, patterns = shown(sections(capsys, "me/mnist_moe"))
    assert "eval/loss" in names <= logged
    assert r"^moe/load/.*\d\d$" in patterns
    assert all(matching(pattern, logged) for pattern in patterns)
    assert set(USUAL.pictures) <= {f"plots/{path.stem}" for run in runs for path in run.glob("*.png")}


def test_run_panels_show_all_logged_metrics(runs: list[Path], capsys: pytest.CaptureFixture[str]):
    found = sections(capsys, runs[1])
    logged = logged_names(runs[1])
    names, patterns = shown(found)
    assert list(found)[:3] == ["Training", "Evaluation", "Mixture of experts"]
    assert "Dynamic experts" in found
    media = ("Pictures", "Tables")
    assert names <= logged
    by_pattern = [matching(pattern, logged) for pattern in patterns]
    assert all(by_pattern)
    assert logged - names.union(*by_pattern) == {"step", "train/epoch"}
    assert all(panel["xAxis"] == "step" for name, panels in found.items() if name not in media for panel in panels)


def test_workspace_has_long_lists_and_a_panel_per_plot_and_table(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "knowledge_graph_epoch_003.png").touch()
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 50, "eval/confusion": [[1, 0], [0, 1]], "moe/load/wide": %s}\n' % ([0.01] * 100))
    found = sections(capsys, run)
    assert ["moe/load/wide"] in [panel["metrics"] for panel in found["Mixture of experts"]]
    assert [panel["mediaKeys"] for panel in found["Pictures"]] == [["plots/knowledge_graph"]]
    for name, panel in zip(("results", "eval/confusion"), found["Tables"], strict=True):
        assert f'"val": "{name}"' in json.dumps(panel)


def test_dashboard_saves_the_workspace_and_reports_failures(tmp_path, monkeypatch, capsys):
    ws = pytest.importorskip("wandb_workspaces.workspaces")
    monkeypatch.setattr("toolkit.run.tracking.trackers.why_offline", lambda: None)
    saved: list[Any] = []
    monkeypatch.setattr(ws.Workspace, "save", lambda workspace: saved.append(workspace))
    monkeypatch.setattr(ws.Workspace, "url", "https://wandb.invalid/me/digits")
    assert main(["dashboard", "wandb", "digits", "--entity", "me"]) == EXIT_DONE
    assert [(workspace.entity, workspace.project) for workspace in saved] == [("me", "digits")]
    assert capsys.readouterr().out == f"https://wandb.invalid/me/digits: {len(saved[0].sections)} sections\n"
    filed = write_run(tmp_path / "filed", settings={"project": "cats"})
    assert main(["dashboard", "wandb", str(filed), "--entity", "me"]) == EXIT_DONE
    assert saved[1].project == "cats"
    capsys.readouterr()

    def fail(_workspace: Any) -> None:
        raise ValueError("no such project\nand more")

    monkeypatch.setattr(ws.Workspace, "save", fail)
    assert main(["dashboard", "wandb", "me/digits"]) == EXIT_USER_ERROR
    rejected = "W&B rejects the workspace (ValueError: no such project and more)."
    assert capsys.readouterr().err == f"error: {rejected} Check that me has a project digits.\n"
