"""Experts that transformers shards are compared one by one, and their faults are named."""

from pathlib import Path

import pytest

from tests.doctor.recording import record
from tests.integrations.peft.models import base
from toolkit.doctor.causes import diagnose
from toolkit.doctor.compare import Comparison, Evidence

SCRIPT = Path(__file__).parent / "sharded_by_transformers.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    base("qwen3_moe").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one(model: str, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return record(tmp_path_factory.mktemp("one") / "run", 1, SCRIPT, model)


def test_experts_sharded_by_transformers_equal_one_process(one: Evidence, model: str, tmp_path: Path):
    comparison = Comparison(one, record(tmp_path / "two", 2, SCRIPT, model), 1e-5)
    assert diagnose(comparison) == []
    assert comparison.ok, [check for check in comparison.checks if not check.ok]
    assert {"gradients", "gradient norm", "weights", "optimizer state"} <= {c.quantity for c in comparison.checks}
    assert any("experts.gate_up_proj" in name for name in comparison.split)


@pytest.mark.parametrize(
    ("fault", "cause"), [("undivided", "gradients W times too large"), ("own_norm", "local clip norm")]
)
def test_fault_of_experts_sharded_by_transformers_is_named(fault, cause, one: Evidence, model: str, tmp_path: Path):
    comparison = Comparison(one, record(tmp_path / "two", 2, SCRIPT, model, fault), 1e-5)
    assert diagnose(comparison)[0].name == cause
    assert fault == "own_norm" or "expert" in comparison["gradients"].place
