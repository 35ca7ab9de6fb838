from __future__ import annotations

import json

import pytest

from toolkit.run.folder import write_json
from toolkit.tracking.jsonl import MetricsFile, read_metrics


def test_numbers_that_json_has_no_words_for_become_null(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.append(1, {"a": float("nan"), "b": [1.0, float("inf")], "c": 2})
    text = (tmp_path / "m.jsonl").read_text()
    assert text == '{"step": 1, "a": null, "b": [1.0, null], "c": 2}\n'
    write_json(tmp_path / "r.json", {"nested": {"a": float("-inf")}, "path": tmp_path})
    assert json.loads((tmp_path / "r.json").read_text()) == {"nested": {"a": None}, "path": str(tmp_path)}
    metrics.close()


def test_a_line_that_a_kill_left_unfinished_is_passed_over(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2]
    assert list(read_metrics(tmp_path / "none.jsonl")) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write_json(tmp_path / "r.json", {"a": 1})

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(tmp_path / "r.json", {"a": 2})
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": 1}
