"""Metrics and results in JSON files."""

import json
import os

import pytest

from tests.support.special_files import symlink_to_file
from toolkit.run.folder import write_json
from toolkit.run.tracking.jsonl import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.jsonl"


@pytest.fixture
def messages():
    return []


@pytest.fixture
def metrics(path, messages):
    return MetricsFile(path, messages.append)


def steps_in(path):
    return [line["step"] for line in read_metrics(path)]


def test_non_finite_numbers_are_written_as_null(metrics, path):
    metrics.append(1, {"a": float("nan"), "b": [1.0, float("inf")], "c": 2})
    assert path.read_text() == '{"step": 1, "a": null, "b": [1.0, null], "c": 2}\n'
    results = path.with_name("r.json")
    write_json(results, {"nested": {"a": float("-inf")}, "path": path})
    assert json.loads(results.read_text()) == {"nested": {"a": None}, "path": str(path)}
    metrics.close()


def test_failed_write_keeps_old_file(tmp_path, monkeypatch):
    write_json(tmp_path / "r.json", {"a": 1})

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(tmp_path / "r.json", {"a": 2})
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("name", ["r.json", ".r.json.partial"])
def test_write_json_replaces_link(name, tmp_path):
    target = symlink_to_file(tmp_path / name)
    write_json(tmp_path / "r.json", {"a": 1})
    assert target.read_text() == "precious"
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": 1}
    assert not (tmp_path / "r.json").is_symlink()


class FullDisk:
    """File on a disk with space for `room` more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if self.room == 0:
            raise OSError(28, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        return self.file.write(taken)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_metrics_on_full_disk_are_written_once_space_is_freed(metrics, path, messages):
    metrics._file = FullDisk(metrics._file, room=20)  # one and a half lines
    for step in (1, 2, 3):
        metrics.append(step, {})
    assert steps_in(path) == [1]
    metrics._file.room = 10_000
    metrics.append(4, {})
    assert steps_in(path) == [1, 2, 3, 4]
    metrics.close()
    (message,) = messages
    assert "No space left on device" in message


def test_close_on_full_disk_counts_lost_lines(metrics, path, messages):
    metrics._file = FullDisk(metrics._file, room=20)
    for step in (1, 2, 3):
        metrics.append(step, {})
    metrics.close()
    assert messages[-1] == f"warning: the last 2 line(s) of {path} are lost: there is no room for them."


def test_truncate_in_read_only_folder_removes_lines(metrics, path):
    for step in (1, 2, 3):
        metrics.append(step, {})
    path.parent.chmod(0o555)
    path.chmod(0o444)
    user = os.geteuid()
    if user == 0:  # root can write all files
        os.seteuid(65534)
    try:
        metrics.truncate(1)
    finally:
        os.seteuid(user)
    metrics.close()
    assert steps_in(path) == [1]


@pytest.mark.parametrize("damage", ["{{{", '{"step": "two"}', "\x00\x00"])
def test_damaged_line_is_skipped_with_warning(damage, path, messages):
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n{{"step": 4}}\n{{"step": 5')
    metrics = MetricsFile(path, messages.append)
    metrics.truncate(3)
    metrics.append(4, {"new": 1})
    metrics.close()
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 3}, {"step": 4, "new": 1}]
    assert messages == [f"warning: {path}: line 2 cannot be read; tables and plots leave it out."]


@pytest.mark.parametrize("damage", ["digit", "first line", "last line", "file", None])
def test_truncate_with_seal_warns_of_changed_lines(damage, metrics, path, messages):
    for step in (1, 2):
        metrics.append(step, {"train/loss": 0.5})
    seal = metrics.seal()
    metrics.append(2, {"run/restarts": 1})  # after the checkpoint with the seal
    metrics.append(3, {})
    metrics.close()
    lines = path.read_text().splitlines(keepends=True)
    changed = {
        "digit": [lines[0].replace("0.5", "0.4"), *lines[1:]],
        "first line": lines[1:],
        "last line": [lines[0], "\0" * len(lines[1]), *lines[3:]],
        "file": [],
        None: lines,
    }
    path.write_text("".join(changed[damage]))
    resumed = MetricsFile(path, messages.append)
    resumed.truncate(2, seal)
    warning = (
        f"warning: {path}: lines up to step 2 were damaged, changed or lost after they were written; "
        "tables and plots show the others."
    )
    assert messages == ([warning] if damage else [])
    resumed.append(3, {})
    assert damage or resumed.seal()["bytes"] == path.stat().st_size
    resumed.close()


def test_file_replaced_during_run_is_written_again(metrics, path, messages):
    metrics.append(1, {})
    path.unlink()
    path.write_text("something else")
    metrics.append(2, {})
    metrics.append(3, {})
    metrics.close()
    assert steps_in(path) == [1, 2, 3]
    assert messages == [f"warning: {path} was removed or replaced: it is written again when the run ends."]
