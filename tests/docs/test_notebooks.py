"""The notebooks run, without a network, a GPU or Jupyter, and show what their words say."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_python import forked_commands, run_forked
from tests.support.helpers import ROOT

IN_FLOAT64 = {
    "torch.manual_seed(0)  # the": "torch.set_default_dtype(torch.float64); torch.manual_seed(0)  # the",
    "from_config(": "from_config(experts_implementation='eager', config=",
    "from_pretrained(": "from_pretrained(experts_implementation='eager', pretrained_model_name_or_path=",
}
"""In float32, rounding would grow. transformers' usual implementation of experts has no float64."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("commands")
    with forked_commands(folder):
        yield folder


def run(name: str, folder: Path, commands: Path, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What is in the namespace after the last cell. `changes` are made to the text first. Cells show text and pictures
    where those of the stored notebook do."""
    text = (ROOT / "docs" / "notebooks" / f"{name}.ipynb").read_text()
    for old, new in (changes or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "notebook.ipynb").write_text(text)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }
    words = [str(ROOT / "tests" / "support" / "notebook.py"), "notebook.ipynb"]
    done = run_forked(*words, env=environment, cwd=folder, python=str(commands / "python"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    values: dict[str, Any] = json.loads((folder / "values.json").read_text())
    stored = {cell["id"]: cell["outputs"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"}
    kinds = [
        {name: [output["output_type"] for output in outputs] for name, outputs in cells.items()}
        for cells in (stored, values["outputs"])
    ]
    assert kinds[0] == kinds[1], "make notebooks stores what they show"
    return values


def results_of(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def test_ten_minutes(tmp_path: Path, commands: Path):
    found = run("ten_minutes", tmp_path, commands)
    one, two = list(found["one"].values()), list(found["two"].values())
    assert one[-1] < 0.2 * one[0]
    assert two == pytest.approx(one, rel=1e-3)
    results = results_of(tmp_path / "runs" / "two")
    assert results["test_accuracy"] > 0.9
    assert results["migrated_experts"] > 0
    continued = results_of(tmp_path / "runs" / "one")
    assert (continued["world_size"], continued["epochs"]) == (2, 8)


def test_spread_experts(tmp_path: Path, commands: Path):
    found = run("shard_experts", tmp_path, commands, IN_FLOAT64)
    one, stay, moved = (found["runs"][name] for name in ("one", "stay", "moved"))
    assert (one["moves"], stay["moves"]) == (0, 0)
    assert moved["moves"] > 0
    assert moved["losses"][-1] < 0.8 * moved["losses"][0]
    assert stay["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert moved["losses"] == pytest.approx(stay["losses"], rel=1e-5)
    assert found["loaded"] == pytest.approx(moved["held_out"], rel=1e-5)


def test_adapters(tmp_path: Path, commands: Path):
    found = run("adapters", tmp_path, commands)
    assert found["after"] < found["before"] - 0.2
    assert found["after"] == pytest.approx(found["trained"], rel=1e-5)
    results = results_of(tmp_path / "runs" / "adapted")
    assert results["world_size"] == 2
    assert results["migrated_experts"] > 0
