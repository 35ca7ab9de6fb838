"""`toolkit dashboard wandb`: sections, panels and metric names of the workspace, which nobody is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recipes import mnist_moe
from tests.commands.report.conftest import write_run
from tests.support.helpers import run_distributed
from toolkit.commands import main
from toolkit.commands.report.dashboard import USUAL
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.run.tracking.guard import expand
from toolkit.run.tracking.jsonl import read_metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run on two processes whose experts a planner moves, and one with dynamic experts."""
    folder = tmp_path_factory.mktemp("runs")
    usual: Any = {"tracker": "none", "cpu": True, "max_steps": 20, "log_every": 5, "dataset": "digits"}
    planned = mnist_moe.debug().replace(
        **usual,
        replan=ReplanOptions(planner="swap", every=5, guarded=False),
        run_dir=folder / "planned",
    )
    dynamic = mnist_moe.debug().replace(**usual, max_experts=8, run_dir=folder / "dynamic")
    run_distributed(mnist_moe.main, 2, planned)
    mnist_moe.main(dynamic)
    return [planned.run_dir, dynamic.run_dir]


def sections(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, list[dict[str, Any]]]:
    """Section -> configurations of its panels, of what --dry-run prints."""
    pytest.importorskip("wandb_workspaces.workspaces")
    capsys.readouterr()
    assert main(["dashboard", "wandb", *map(str, words), "--dry-run"]) == EXIT_DONE
    view = json.loads(capsys.readouterr().out)
    bank = view["section"]["panelBankConfig"]["sections"]
    return {section["name"]: [panel["config"] for panel in section["panels"]] for section in bank}


def logged_names(run: Path) -> set[str]:
    """As trackers get them, each expert's load by itself."""
    return {name for line in read_metrics(run / "metrics.jsonl") for name in expand(line)}


def unknown(found: dict[str, list[dict[str, Any]]], names: set[str]) -> list[str]:
    """The metrics of panels that no run has logged under that name."""
    panels = [panel for panels in found.values() for panel in panels]
    wanted = [name for panel in panels for name in panel.get("metrics", [])]
    patterns = [panel["metricRegex"] for panel in panels if panel.get("useMetricRegex")]
    assert wanted
    assert patterns
    return [name for name in wanted if name not in names] + [
        pattern for pattern in patterns if not any(re.search(pattern, name) for name in names)
    ]


def test_every_panel_of_a_project_shows_a_metric_that_runs_log(runs: list[Path], capsys: pytest.CaptureFixture[str]):
    names = logged_names(runs[0]) | logged_names(runs[1])
    found = sections(capsys, "me/mnist_moe")
    assert unknown(found, names) == []
    assert unknown(found, {name.replace("eval/loss", "eval/nats") for name in names}) == ["eval/loss"]
    assert unknown(found, {name.replace("moe/load/", "moe/share/") for name in names}) == [r"^moe/load/.*\d\d$"]
    pictures = {f"plots/{path.stem}" for run in runs for path in run.glob("*.png")}
    assert set(USUAL.pictures) <= pictures


def test_a_run_has_a_panel_for_each_of_its_metrics(runs: list[Path], capsys: pytest.CaptureFixture[str]):
    found = sections(capsys, runs[1])
    names = logged_names(runs[1])
    assert list(found)[:3] == ["Training", "Evaluation", "Mixture of experts"]
    assert "Dynamic experts" in found
    assert unknown(found, names) == []
    shown = {name for panels in found.values() for panel in panels for name in panel.get("metrics", [])}
    patterns = [panel["metricRegex"] for panels in found.values() for panel in panels if "metricRegex" in panel]
    left = {name for name in names - shown if not any(re.search(pattern, name) for pattern in patterns)}
    assert left == {"step", "train/epoch"}
    assert all(panel["xAxis"] == "step" for name, panels in found.items() if name != "Pictures" for panel in panels)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["dashboard", *map(str, words)]) == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_the_workspace_is_saved_and_its_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
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
    assert saved[1].project == "cats", "where --project has put the run"
    capsys.readouterr()

    def refuse(_workspace: Any) -> None:
        raise ValueError("no such project\nand more")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    line = refusal(capsys, "wandb", "me/digits")
    rejected = "W&B rejects the workspace (ValueError: no such project and more)."
    assert line == f"{rejected} Check that me has a project digits."
