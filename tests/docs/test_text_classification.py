"""The text classification example with AutoModel."""

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import ROOT, run_distributed
from toolkit.run.tracking.jsonl import read_metrics

SCRIPT = ROOT / "docs" / "examples" / "text_classification.py"


def train(folder: Path, run: str, **changes: Any) -> dict[str, Any]:
    """Train the debug preset in float64 on the text in `folder`."""
    spec: Any = importlib.util.spec_from_file_location("text_classification", SCRIPT)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    build = script.build_model
    usual: Any = {"data_dir": folder, "run_dir": folder / run, "tracker": "none", "cpu": True}
    with in_float64(), mock.patch.object(script, "build_model", lambda *args: build(*args).double()):
        return script.main(script.debug().replace(**usual, **changes))


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]


def test_example_on_two_processes_equals_one_process_and_reloads(tmp_path: Path):
    draws = random.Random(0)
    lines = (" ".join(draws.choices(["TO BE", "OR NOT", "THAT IS", "THE QUESTION"], k=6)) for _ in range(2000))
    (tmp_path / "input.txt").write_text("\n".join(lines))
    single = train(tmp_path, "one")
    assert single["dataset"].startswith("tinyshakespeare / language reference of Python")
    assert single["test_accuracy"] > 0.6, "chance is a third"
    for results in run_distributed(train, 2, tmp_path, "two"):
        assert results["test_loss"] == pytest.approx(single["test_loss"], rel=IN_FLOAT64)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=IN_FLOAT64)

    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two" / "model")
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "one" / "model")
    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(reloaded(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert reloaded.config.id2label[0] == "tinyshakespeare"

    further = train(tmp_path, "further", model=str(tmp_path / "one" / "model"), tokenizer="bytes", max_steps=10)
    assert losses(tmp_path / "further")[0] < losses(tmp_path / "one")[0]
    assert further["steps"] == 10
