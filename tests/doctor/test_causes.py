"""Each fault of the toy is caught, and called by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.watched import watched
from toolkit.doctor.causes import diagnose
from toolkit.doctor.compare import Comparison, Evidence
from toolkit.doctor.examine import judge
from toolkit.doctor.record import read_records

TOY = Path(__file__).parent / "toy.py"

FAULTS = {
    "sum": "gradients W times too large",
    "clip": "local clip norm",
    "refresh": "unsynchronised replica",
    "stale": "stale optimizer row after a move",
    "balance": "rank-local balance loss",
    "permutation": "wrong inverse permutation",
    "late_permutation": "wrong inverse permutation",
    "late_norm": "forward depends on the rank",
    "recompute": "router decides otherwise under recomputation",
    "save": "expert lost on save",
    "order": "data order changed",
    "buffer": "buffer overwritten by broadcast",
    "optimizer": "parameter outside the optimizer",
    "seed": "initial weights differ",
    "rate": "learning rate depends on the world",
    "batch_norm": "batch statistics of one rank",
    "twice": "gradients too small",
    "mean": "loss normalised by rank",
    "unsynchronised": "unsynchronised replica",
    "dropped": "weights lost in a move",
    "unfreeze": "parameter unfrozen after prepare",
}
NOTHING_IN_ONE_PROCESS = {
    *("sum", "twice", "refresh", "stale", "dropped", "permutation", "late_permutation", "late_norm"),
    *("order", "mean", "rate", "seed", "balance"),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the toy without a fault did in "one" process and in "two"."""
    folder = tmp_path_factory.mktemp("healthy")
    watched(folder / "one", 1, TOY)
    watched(folder / "two", 2, TOY)
    return folder


def seen(folder: Path) -> Evidence:
    """Read anew: tests change it."""
    return Evidence(read_records(folder))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_called_by_its_name(fault: str, healthy: Path, tmp_path: Path):
    one = seen(healthy / "one") if fault in NOTHING_IN_ONE_PROCESS else watched(tmp_path / "one", 1, TOY, fault)
    comparison = Comparison(one, watched(tmp_path / "two", 2, TOY, fault), 1e-6)
    assert not comparison.ok
    first, *others = diagnose(comparison)
    assert first.name == FAULTS[fault], first
    assert fault == "batch_norm" or not others, "one fault has one finding; batch norm has statistics in buffers, too"
    if fault.startswith("late"):
        assert first.symptom.startswith("at step 2, with equal weights and samples, ")


def test_what_is_right_is_not_reported(healthy: Path):
    comparison = Comparison(seen(healthy / "one"), seen(healthy / "two"), 1e-6)
    assert diagnose(comparison) == []
    assert comparison.ok
    assert {check.quantity for check in comparison.checks} >= {
        "samples",
        "expert counts",
        "balance loss",
        "loss",
        "gradients",
        "gradient norm",
        "weights",
        "optimizer state",
        "save and load",
    }
    assert comparison.many.has_moved(2), "the toy moves experts after its second step"


def test_a_factor_of_one_explains_nothing(healthy: Path):
    one, many = seen(healthy / "one"), seen(healthy / "two")
    for record in many.records:
        for name in [name for name in record.tensors if name.startswith("1/gradient")]:
            record.tensors[name] = record.tensors[name] * (1 - 2e-5)
    (finding,) = diagnose(Comparison(one, many, 1e-6))
    assert finding.name == "wrong gradients"
    assert "1 times" not in finding.symptom


def test_a_script_that_is_another_each_time_is_called_that_first(tmp_path: Path):
    one, many = watched(tmp_path / "one", 1, TOY, "time"), watched(tmp_path / "two", 2, TOY, "time")
    _, findings = judge(one, many, 1e-6, lambda name, world, _: watched(tmp_path / name, world, TOY, "time"))
    assert findings[0].name == "not repeatable"


def test_what_rounding_alone_does_is_no_fault_and_what_is_more_is_one(healthy: Path):
    one, many, rounded = seen(healthy / "one"), seen(healthy / "two"), seen(healthy / "one")
    for record in many.records:
        for name in [name for name in record.tensors if name.startswith("1/gradient")]:
            record.tensors[name] = record.tensors[name] * (1 + 1e-5)
    for name in [name for name in rounded.first.tensors if name.startswith("1/gradient")]:
        rounded.first.tensors[name] = rounded.first.tensors[name] * (1 + 2e-6)

    yardstick = Comparison(one, rounded, 1e-6)
    assert not Comparison(one, many, 1e-6).ok
    assert Comparison(one, many, 1e-6, yardstick).ok
    for name in [name for name in many.first.tensors if name.startswith("1/gradient")]:
        many.first.tensors[name] = many.first.tensors[name] * (1 + 2e-5)
    assert not Comparison(one, many, 1e-6, yardstick)["gradients"].ok
