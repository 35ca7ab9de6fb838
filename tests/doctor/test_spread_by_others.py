"""Experts that transformers spreads are read whole, and a fault of theirs is called by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.watched import watched
from tests.integrations.peft.models import base
from toolkit.doctor.causes import diagnose
from toolkit.doctor.compare import Comparison, Evidence

SCRIPT = Path(__file__).parent / "spread_by_transformers.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    base("qwen3_moe").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one(saved: str, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return watched(tmp_path_factory.mktemp("one") / "run", 1, SCRIPT, saved)


def test_experts_that_transformers_spreads_train_as_in_one_process(one: Evidence, saved: str, tmp_path: Path):
    comparison = Comparison(one, watched(tmp_path / "two", 2, SCRIPT, saved), 1e-5)
    assert diagnose(comparison) == []
    assert comparison.ok, [check for check in comparison.checks if not check.ok]
    assert {"gradients", "gradient norm", "weights", "optimizer state"} <= {c.quantity for c in comparison.checks}
    assert any("experts.gate_up_proj" in name for name in comparison.split), "experts are compared one by one"


def test_gradients_of_their_experts_that_are_not_averaged_are_named(one: Evidence, saved: str, tmp_path: Path):
    comparison = Comparison(one, watched(tmp_path / "two", 2, SCRIPT, saved, "undivided"), 1e-5)
    first = diagnose(comparison)[0]
    assert first.name == "gradients W times too large", first
    assert "expert" in comparison["gradients"].place


def test_a_norm_of_one_rank_is_named(one: Evidence, saved: str, tmp_path: Path):
    comparison = Comparison(one, watched(tmp_path / "two", 2, SCRIPT, saved, "own_norm"), 1e-5)
    assert diagnose(comparison)[0].name == "local clip norm"
