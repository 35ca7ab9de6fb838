"""`toolkit lab` on traces and on synthetic loads."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from toolkit.commands import main
from toolkit.experts.placement.placement import contiguous
from toolkit.experts.routing.traces import TraceFile, read_trace
from toolkit.lab.replay import STAY


def test_lab_with_a_trace_prints_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, out, machine = tmp_path / "hot.npz", tmp_path / "report", tmp_path / "machine.json"
    file = TraceFile(path)
    load_FLSE = np.tile(np.array([[40, 30, 5, 5], [30, 40, 5, 5]]), (12, 1, 1, 1))
    file.add(load_FLSE, list(range(12)), [contiguous(4, 2)])
    facts = {"layers": ["block"], "world_size": 2, "ep_size": 2, "row_bytes": [[100, 100]], "seed": 7}
    file.close({**facts, "weight_bytes": [10], "optimizer_bytes": [20]})
    machine.write_text('{"seconds_per_row": 2e-6, "bytes_per_second": 25e9, "cores": {"count": 2}}')
    words = ["lab", str(path), "--every", "4", "--planner", "lpt", "swap", "--out", str(out), "--machine", str(machine)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    digest = read_trace(path).digest
    assert f"seed 7, SHA-256 {digest[:16]}" in printed
    assert "| swap, guarded |" in printed
    report = json.loads((out / "report.json").read_text())
    assert report["cases"][0]["sha256"] == digest
    assert [row["planner"] for row in report["rows"]] == [STAY, "lpt", "lpt", "swap", "swap"]
    assert report["rows"][0]["step ms"] == pytest.approx(1e3 * (140 * 2e-6 + 70 * 2 * 200 / 25e9))
    assert (out / "imbalance.png").read_bytes()[:4] == b"\x89PNG"
    assert "imbalance.png" in (out / "report.md").read_text()


def test_lab_without_a_trace_runs_all_workloads(capsys: pytest.CaptureFixture[str]):
    assert main(["lab", "--every", "100", "--planner", "swap", "--ranks", "4"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("## ")] == [f"## W{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--planner", "swop"], "planner='swop': unknown. Take one of contiguous, lpt, "),
        (["--planner", "math:no_such"], "planner='math:no_such': cannot be imported"),
        (["--every", "0"], "argument --every: 0: take one or more"),
        (["pipe"], "pipe: not a file"),
        (["--machine", "pipe"], "pipe: not a file"),
        (["--machine", "machine.json"], "error: machine.json: cannot be read (JSONDecodeError"),
    ],
)
def test_lab_with_invalid_input_exits_with_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("machine.json").write_text("[1, 2")
    assert main(["lab", *words]) == 2
    assert message in capsys.readouterr().err


def test_lab_with_an_imported_planner_equals_its_name(capsys: pytest.CaptureFixture[str]):
    name = "toolkit.experts.placement.planners.simple:lpt"
    assert main(["lab", "--every", "100", "--planner", name, "lpt", "--ranks", "4"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    columns = {row[1].strip(): [cell.strip() for cell in row[2:-2]] for row in rows}
    assert columns[name] == columns["lpt"]
