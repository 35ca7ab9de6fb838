from __future__ import annotations

import json
import os

import pytest

from toolkit.run.folder import write_json
from toolkit.run.tracking.jsonl import MetricsFile, read_metrics


def test_numbers_that_json_has_no_words_for_become_null(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl", print)
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


class FullDisk:
    """In place of a file: takes `room` bytes, and then none until there is more."""

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


def test_lines_that_a_full_disk_does_not_take_are_written_when_there_is_room(tmp_path):
    said = []
    metrics = MetricsFile(tmp_path / "m.jsonl", said.append)
    metrics._file = FullDisk(metrics._file, room=20)  # one line and a half
    for step in (1, 2, 3):
        metrics.append(step, {})
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    metrics._file.room = 10_000
    metrics.append(4, {})
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 3, 4]
    metrics.close()
    assert len(said) == 1


def test_lines_are_removed_though_the_folder_has_become_read_only(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl", print)
    for step in (1, 2, 3):
        metrics.append(step, {})
    tmp_path.chmod(0o555)
    (tmp_path / "m.jsonl").chmod(0o444)
    user = os.geteuid()
    if user == 0:  # who may write all files
        os.seteuid(65534)
    try:
        metrics.truncate(1)
    finally:
        os.seteuid(user)
    metrics.close()
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1]


@pytest.mark.parametrize("damage", ["{{{", '{"step": "two"}', "\x00\x00"])
def test_a_damaged_line_is_named_and_those_around_it_are_kept(damage, tmp_path):
    path, said = tmp_path / "m.jsonl", []
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n{{"step": 4}}\n{{"step": 5')
    metrics = MetricsFile(path, said.append)
    metrics.truncate(3)
    metrics.append(4, {"anew": 1})
    metrics.close()
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 3}, {"step": 4, "anew": 1}]
    assert said == [f"warning: {path}: line 2 cannot be read; tables and plots leave it out."]


@pytest.mark.parametrize("damage", ["a digit", "a line", "the last line", "the file", "nothing"])
def test_lines_that_were_changed_after_they_were_written_are_said(damage, tmp_path):
    path, said = tmp_path / "m.jsonl", []
    metrics = MetricsFile(path, said.append)
    for step in (1, 2):
        metrics.append(step, {"train/loss": 0.5})
    seal = metrics.seal()
    metrics.append(2, {"run/restarts": 1})  # written after the checkpoint that has the seal
    metrics.append(3, {})
    metrics.close()
    lines = path.read_text().splitlines(keepends=True)
    changed = {
        "a digit": [lines[0].replace("0.5", "0.4"), *lines[1:]],
        "a line": lines[1:],
        "the last line": [lines[0], "\0" * len(lines[1]), *lines[3:]],
        "the file": [],
        "nothing": lines,
    }
    path.write_text("".join(changed[damage]))
    again = MetricsFile(path, said.append)
    again.truncate(2, seal)
    warning = (
        f"warning: {path}: lines up to step 2 were damaged, changed or lost after they were written; "
        "tables and plots show the others."
    )
    assert said == ([] if damage == "nothing" else [warning])
    again.append(3, {})
    if damage == "nothing":
        assert again.seal()["bytes"] == path.stat().st_size
    again.close()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_removed_in_mid_run_is_written_again(how, tmp_path):
    path, said = tmp_path / "run" / "m.jsonl", []
    path.parent.mkdir()
    metrics = MetricsFile(path, said.append)
    metrics.append(1, {})
    path.unlink()
    if how == "removed":
        path.parent.rmdir()
    else:
        path.write_text("something else")
    metrics.append(2, {})
    metrics.append(3, {})
    metrics.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert said == [f"warning: {path} was removed or replaced: it is written again when the run ends."]


@pytest.mark.parametrize("place", ["r.json", ".r.json.partial"])
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(place, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / place).symlink_to(tmp_path / "precious")
    write_json(tmp_path / "r.json", {"a": 1})
    assert (tmp_path / "precious").read_text() == "precious"
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": 1}
    assert not (tmp_path / "r.json").is_symlink()


def test_lines_that_never_found_room_are_counted_at_the_end(tmp_path):
    said = []
    metrics = MetricsFile(tmp_path / "m.jsonl", said.append)
    metrics._file = FullDisk(metrics._file, room=20)
    for step in (1, 2, 3):
        metrics.append(step, {})
    metrics.close()
    assert said[-1] == f"warning: the last 2 line(s) of {tmp_path / 'm.jsonl'} are lost: there is no room for them."
