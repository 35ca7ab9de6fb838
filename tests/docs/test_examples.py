"""Training scripts of the documentation, on one and on two processes."""

import importlib.util
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import ROOT, run_distributed
from tests.recipes.runs import losses
from tests.support.forked_python import run_forked
from toolkit.run.tracking.jsonl import read_metrics


def train(example: str, folder: Path, processes: int, *flags: str) -> partial[list[float]]:
    """Run the debug preset; returns a function from metric name to values."""
    words = ["debug", "--cpu", "--num-processes", str(processes), "--run-dir", str(folder), "--tracker", "none"]
    done = run_forked(str(ROOT / "docs" / "examples" / f"{example}.py"), *words, "--log-every", "5", *flags)
    assert done.returncode == 0, done.stderr
    return partial(values, list(read_metrics(folder / "metrics.jsonl")))


def values(lines: list[dict[str, float]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("example", ["sgd_plateau", "third_party_optimizer", "own_loop"])
def test_losses_on_two_processes_equal_one_process(example: str, tmp_path: Path):
    single, sharded = (train(example, tmp_path / str(processes), processes) for processes in (1, 2))
    for name in ("train/loss",) if example == "own_loop" else ("train/loss", "eval/loss"):
        assert len(single(name)) > 0
        assert sharded(name) == pytest.approx(single(name), rel=1e-5)
    if example == "sgd_plateau":
        rates = single("train/learning_rate")
        assert rates[-1] < rates[0]
        assert sharded("train/learning_rate") == rates
        train(example, tmp_path / "resumed", 1, "--max-steps", "46")
        resumed = train(example, tmp_path / "resumed", 1, "--extend", "--max-steps", "92")
        for name in ("train/loss", "train/learning_rate"):
            assert resumed(name)[-3:] == single(name)[-3:]


def test_readme_diff_equals_its_script():
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    after = [line[1:] for line in diff.splitlines() if line[:1] in ("+", " ") and line[1:]]
    script = (ROOT / "docs" / "examples" / "two_lines.py").read_text().splitlines()
    places = [script.index(line) for line in after]
    assert places == sorted(places)
    assert diff.count("\n+") + diff.startswith("+") == 2


def classify(folder: Path, run: str, **changes: Any) -> dict[str, Any]:
    """Train the debug preset in float64 on the text in `folder`."""
    spec: Any = importlib.util.spec_from_file_location(
        "text_classification", ROOT / "docs/examples/text_classification.py"
    )
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    build = script.build_model
    usual: Any = {"data_dir": folder, "run_dir": folder / run, "tracker": "none", "cpu": True}
    with in_float64(), mock.patch.object(script, "build_model", lambda *args: build(*args).double()):
        return script.main(script.debug().replace(**usual, **changes))


def test_example_on_two_processes_equals_one_process_and_reloads(tmp_path: Path):
    draws = random.Random(0)
    lines = (" ".join(draws.choices(["TO BE", "OR NOT", "THAT IS", "THE QUESTION"], k=6)) for _ in range(2000))
    (tmp_path / "input.txt").write_text("\n".join(lines))
    single = classify(tmp_path, "one")
    assert single["dataset"].startswith("tinyshakespeare / language reference of Python")
    assert single["test_accuracy"] > 0.6, "chance is a third"
    for results in run_distributed(classify, 2, tmp_path, "two"):
        assert results["test_loss"] == pytest.approx(single["test_loss"], rel=IN_FLOAT64)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=IN_FLOAT64)

    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two" / "model")
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "one" / "model")
    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(reloaded(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert reloaded.config.id2label[0] == "tinyshakespeare"

    further = classify(tmp_path, "further", model=str(tmp_path / "one" / "model"), tokenizer="bytes", max_steps=10)
    assert losses(tmp_path / "further")[0] < losses(tmp_path / "one")[0]
    assert further["steps"] == 10
