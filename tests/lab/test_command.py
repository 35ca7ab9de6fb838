"""`toolkit lab` on traces and on synthetic loads, and replay of planners on recorded loads."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from toolkit.commands import main
from toolkit.errors import UserError
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.routing.traces import TraceFile, read_trace
from toolkit.lab.replay import (
    STAY,
    Case,
    Replay,
    Rules,
    case_of_workload,
    on_ranks,
    replay,
    try_planner,
    worst_span,
)
from toolkit.lab.workloads import Sizes

IMPORTED = "toolkit.experts.placement.planners.simple:lpt"


def test_lab_with_a_trace_prints_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, out, machine = tmp_path / "hot.npz", tmp_path / "report", tmp_path / "machine.json"
    file = TraceFile(path)
    load_FLSE = np.tile(np.array([[40, 30, 5, 5], [30, 40, 5, 5]]), (12, 1, 1, 1))
    file.add(load_FLSE, list(range(12)), [contiguous(4, 2)])
    facts = {"layers": ["block"], "world_size": 2, "ep_size": 2, "row_bytes": [[100, 100]], "seed": 7}
    file.close({**facts, "weight_bytes": [10], "optimizer_bytes": [20]})
    machine.write_text('{"seconds_per_row": 2e-6, "bytes_per_second": 25e9, "cores": {"count": 2}}')
    words = ["--every", "4", "--planner", IMPORTED, "swap", "--out", str(out), "--machine", str(machine)]
    assert main(["lab", str(path), *words]) == 0
    printed = capsys.readouterr().out
    digest = read_trace(path).digest
    assert f"seed 7, SHA-256 {digest[:16]}" in printed
    assert "| swap, guarded |" in printed
    report = json.loads((out / "report.json").read_text())
    assert report["cases"][0]["sha256"] == digest
    assert [row["planner"] for row in report["rows"]] == [STAY, IMPORTED, IMPORTED, "swap", "swap"]
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
        (["ids.jsonl"], "ids that no expert has"),
    ],
)
def test_lab_with_invalid_input_exits_with_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("machine.json").write_text("[1, 2")
    Path("ids.jsonl").write_text('{"step": 0, "layer": 1, "top_indices": [[99999999999]]}')
    assert main(["lab", *words]) == 2
    assert message in capsys.readouterr().err


# With two steps per window, experts 0 and 1 are hot in the first, 0 and 2 in the others. Rank 0 sends all pairs.
PAIRS = np.array([[4, 4, 1, 1]] * 2 + [[4, 1, 4, 1]] * 3)
LOADS = np.stack([PAIRS, np.zeros_like(PAIRS)], axis=1)
BLOCKS, CROSSED = contiguous(4, 2), ExpertPlacement(((0, 2), (1, 3)))


def test_replay_applies_a_plan_from_the_next_window():
    calls = []

    def cross(load_E: np.ndarray, current: ExpertPlacement) -> ExpertPlacement:
        calls.append((load_E.tolist(), current))
        return CROSSED

    run = replay(LOADS, BLOCKS, cross, every=2)
    assert calls == [(PAIRS[0].tolist(), BLOCKS), (PAIRS[2].tolist(), CROSSED)]
    assert run.rows.tolist() == [[8, 2], [8, 2], [8, 2], [8, 2], [8, 2]]
    assert run.placements == (BLOCKS, CROSSED, CROSSED)
    stays = replay(LOADS, BLOCKS, None, every=2)
    assert stays.imbalance.tolist() == [1.6, 1.6, 1.0, 1.0, 1.0]
    assert stays.placements == (BLOCKS,) * 3


def test_worst_span():
    cost_model = CostModel(seconds_per_row=1.0, bytes_per_second=100.0, weight_bytes=100)
    run = Replay(np.zeros((5, 2), dtype=np.int64), (BLOCKS, CROSSED, CROSSED), every=2)
    # Steps 2 to 4 take 8 s each instead of 5, and the first migration takes 1 s: 25 s instead of 15 s.
    assert worst_span(LOADS, run, cost_model) == 25 / 15


def test_try_planner_equals_closed_forms():
    loads = np.tile(np.array([[40, 30, 5, 5], [30, 40, 5, 5]]), (12, 1, 1, 1))
    case = Case("hot", loads, (200,), (10,), (20,), "", 7)
    rules = Rules(every=4)
    stay = try_planner(case, STAY, guarded=False, rules=rules)
    # The busiest rank computes 140 rows; 70 rows of 200 bytes leave rank 1 in each pass.
    assert stay["step ms"] == pytest.approx(1e3 * (140e-6 + 70 * 2 * 200 / 25e9))
    assert (stay["imbalance"], stay["p95"], stay["experts moved"]) == (1.75, 1.75, 0)
    swap = try_planner(case, "swap", guarded=False, rules=rules)
    assert (swap["imbalance"], swap["experts moved"], swap["MB moved"]) == (1.0, 2, 2 * (10 + 20) / 1e6)
    # Each rank computes 80 rows, 45 of them from the other rank; in one of eight steps both send an expert.
    moving = (10 + 20) / 25e9 / 8
    assert swap["step ms"] == pytest.approx(1e3 * (80e-6 + 45 * 2 * 200 / 25e9 + moving))
    assert swap["worst span"] < 1
    # Both hot experts have a replica, which exchanges 10 bytes of gradients and of weights.
    assert try_planner(case, "replicate", guarded=False, rules=rules)["replica MB"] == pytest.approx(2 * 2 * 10 / 1e6)
    # Adjacent hot experts are on different ranks.
    rotating, turns = case_of_workload("W6", Sizes(steps=60)), Rules(initial_placement="round_robin")
    assert try_planner(rotating, STAY, guarded=False, rules=turns)["imbalance"] < 1.2
    with pytest.raises(UserError, match="--every 12: hot has 12 steps"):
        try_planner(case, STAY, guarded=False, rules=Rules(every=12))


def test_on_ranks_preserves_loads():
    load = np.random.default_rng(0).integers(0, 50, (3, 2, 2, 5))
    more = on_ranks(load, 6)
    assert more.shape == (3, 2, 6, 5)
    assert (more.reshape(3, 2, 2, 3, 5).sum(3) == load).all()
    assert (more.reshape(3, 2, 2, 3, 5).max(3) - more.reshape(3, 2, 2, 3, 5).min(3)).max() == 1
    assert (on_ranks(load, 1)[:, :, 0] == load.sum(2)).all()
    # Of two EP groups, ranks 0 and 2 hold the same experts.
    assert (on_ranks(more[:, :, :4], 2) == more[:, :, :2] + more[:, :, 2:4]).all()
    with pytest.raises(UserError, match="--ranks 3: the trace has 2 source ranks"):
        on_ranks(load, 3)
