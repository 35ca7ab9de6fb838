"""`toolkit lab` tells planners apart, in words, figures and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from toolkit.commands import main
from toolkit.errors import UserError
from toolkit.experts.placement.placement import contiguous
from toolkit.experts.routing.traces import TraceFile, read_trace
from toolkit.lab.report import ASSUMED, STAY, Rules, case_of_trace, case_of_workload, on_ranks, try_planner
from toolkit.lab.workloads import Sizes

SIZES = Sizes(steps=60, ranks=4, experts=16, assignments=512)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Experts 0 and 1 of 4 are hot, and live on one rank of two."""
    path = tmp_path / "hot.npz"
    file = TraceFile(path)
    load_FLSE = np.tile(np.array([[40, 30, 5, 5], [30, 40, 5, 5]]), (12, 1, 1, 1))
    file.add(load_FLSE, list(range(12)), [contiguous(4, 2)])
    facts = {"layers": ["block"], "world_size": 2, "ep_size": 2, "row_bytes": [[100, 100]], "seed": 7}
    file.close({**facts, "weight_bytes": [10], "optimizer_bytes": [20]})
    return path


def test_a_trace_by_hand(trace: Path):
    case = case_of_trace("hot", read_trace(trace))
    rules = Rules(every=4)
    stay = try_planner(case, STAY, guarded=False, rules=rules)
    # 140 rows of the busiest rank; 70 of 200 bytes leave rank 1, forward and backward.
    assert stay["step ms"] == pytest.approx(1e3 * (140e-6 + 70 * 2 * 200 / 25e9))
    assert (stay["imbalance"], stay["bound"], stay["experts moved"]) == (1.75, 1.0, 0)
    assert stay["hierarchical ms"] is None, "one node"
    # Each rank on a node of its own, two experts of a token: each of rank 1's 40 tokens goes to rank 0 once, by both.
    two_nodes = replace(rules, machine=replace(ASSUMED, ranks_per_node=1, top_k=2))
    by_node = try_planner(case, STAY, guarded=False, rules=two_nodes)
    assert by_node["step ms"] == by_node["hierarchical ms"] == pytest.approx(1e3 * (140e-6 + 40 * 2 * 200 / 25e9))
    swap = try_planner(case, "swap", guarded=False, rules=rules)
    assert (swap["imbalance"], swap["plan over bound"], swap["experts moved"]) == (1.0, 1.0, 2)
    assert swap["MB moved"] == 2 * (10 + 20) / 1e6
    assert swap["worst span"] < 1
    # Rank 0 sends its 10 copies for 2 and 3 away and rank 1 its 70 for 0 and 1: there and back, forward and backward.
    assert stay["all-to-all MB"] == pytest.approx((10 + 70) * 2 * 200 / 1e6)
    # One hot expert on each rank: 35 of each rank's 80 copies stay at home, 45 leave.
    assert swap["all-to-all MB"] == pytest.approx((45 + 45) * 2 * 200 / 1e6)


def test_a_guarded_plan_waits_until_it_has_proved_itself_and_a_hopeless_one_forever():
    case = case_of_workload("W2", SIZES)
    rules = Rules(every=10, machine=replace(ASSUMED, seconds_per_row=1e-4))
    guarded = try_planner(case, "swap", guarded=True, rules=rules)
    free = try_planner(case, "swap", guarded=False, rules=rules)
    assert free["imbalance"] < guarded["imbalance"] < try_planner(case, STAY, guarded=False, rules=rules)["imbalance"]
    assert guarded["worst span"] <= 1 + 1e-9
    balanced = try_planner(case_of_workload("W0", SIZES), "lpt", guarded=True, rules=Rules(every=10))
    assert balanced["experts moved"] == 0


def test_neighbours_that_are_hot_together_do_no_harm_where_experts_were_placed_round_robin():
    case = case_of_workload("W6", SIZES)
    for name in (STAY, "swap"):
        blocks, turns = (
            try_planner(case, name, guarded=False, rules=Rules(every=10, initial_placement=initial_placement))[
                "imbalance"
            ]
            for initial_placement in ("contiguous", "round_robin")
        )
        assert turns < 1.2 < blocks


def test_loads_of_one_source_are_cut_into_those_of_more_and_nothing_is_lost():
    load = np.random.default_rng(0).integers(0, 50, (3, 2, 2, 5))
    more = on_ranks(load, 6)
    assert more.shape == (3, 2, 6, 5)
    assert (more.reshape(3, 2, 2, 3, 5).sum(3) == load).all()
    assert (more.reshape(3, 2, 2, 3, 5).max(3) - more.reshape(3, 2, 2, 3, 5).min(3)).max() == 1
    assert (on_ranks(load, 1)[:, :, 0] == load.sum(2)).all()
    with pytest.raises(UserError, match="--ranks 3: take a divisor or a multiple of the trace's 2"):
        on_ranks(load, 3)


def test_the_command_prints_and_writes_a_report(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "report"
    words = ["lab", str(trace), "--every", "4", "--planner", "lpt", "swap", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    digest = read_trace(trace).digest
    assert f"seed 7, SHA-256 {digest[:16]}" in printed
    assert "| swap, guarded |" in printed
    report = json.loads((out / "report.json").read_text())
    assert report["cases"][0]["sha256"] == digest
    assert [row["planner"] for row in report["rows"]] == [STAY, "lpt", "lpt", "swap", "swap"]
    assert (out / "imbalance.png").read_bytes()[:4] == b"\x89PNG"
    assert "imbalance.png" in (out / "report.md").read_text()


def test_the_workloads_are_tried_where_no_trace_is_given(capsys: pytest.CaptureFixture[str]):
    assert main(["lab", "--steps", "30", "--every", "10", "--planner", "swap", "--ranks", "4"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("## ")] == [f"## W{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--planner", "swop"], "unknown 'swop': did you mean swap?"),
        (["--every", "0"], "argument --every: 0: take one or more"),
        (["--every", "500"], "--every 500: W0 has 400 steps; take fewer"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, sentence, capsys: pytest.CaptureFixture[str]):
    assert main(["lab", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
