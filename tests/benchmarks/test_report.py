"""What a record holds besides its rows, and where tables are put on a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import report, stale


def test_a_record_tells_how_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(report, "ROOT", tmp_path)
    script = tmp_path / "benchmarks" / "speed.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--data-dir", str(tmp_path / "digits"), "--seeds", "3"])
    report.write_report("speed", [{"arm": "a", "ms": 1.5}], rounds=9)
    record = json.loads((tmp_path / "benchmarks" / "results" / "speed.json").read_text())
    assert record["rows"] == [{"arm": "a", "ms": 1.5}]
    assert record["rounds"] == 9
    assert record["command"] == "python benchmarks/speed.py --data-dir digits --seeds 3"  # no path of this machine
    assert record["commit"] == report.COMMIT
    machine = record["machine"]
    assert machine["load before"] >= 0
    assert machine["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"processor", "cores", "python", "accelerate", "numpy", "date"} <= set(machine)
    assert capsys.readouterr().out == "| arm | ms |\n|---|---|\n| a | 1.5 |\n"


def test_tables_replace_those_between_their_own_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    first, second = (f"<!-- tables of benchmarks/{name}.py -->\nold\n<!-- end of tables -->\n" for name in ("a", "b"))
    page.write_text(f"Before.\n{first}Between.\n{second}After.\n")
    report.put_tables(page, "b.py", "| new |")
    text = page.read_text()
    assert text.startswith(f"Before.\n{first}Between.\n")
    assert "| new |\n<!-- end of tables -->\nAfter." in text
    assert text.count("old") == 1


def test_the_spread_of_one_value_is_not_known():
    assert report.sd([1.0, 2.0, 4.0], 2) == 1.53
    assert report.sd([1.0], 2) is None


def test_what_each_record_measures_is_a_folder_of_today():
    scripts = {path.name for path in (stale.ROOT / "benchmarks").rglob("*.py")}
    records = [json.loads(path.read_text()) for path in (stale.ROOT / "benchmarks" / "results").glob("*.json")]
    recorded = {stale.script_of(record["command"]) for record in records if "command" in record}
    assert recorded <= set(stale.MEASURED) <= scripts
    for folders in stale.MEASURED.values():
        assert all((stale.ROOT / folder).is_dir() for folder in folders), folders
