"""The key of what was decoded changes with the content of files; checksums in Parquet files are checked."""

import os
from pathlib import Path

import pytest

import toolkit.data.files
from toolkit.data.files import all_parts, content_key, parquet_splits, read_columns
from toolkit.data.rows import load_splits
from toolkit.errors import UserError

SMALL = {"everything is read": 2**27, "a part is read": 100}


@pytest.fixture(params=SMALL)
def limit(request, monkeypatch):
    monkeypatch.setattr(toolkit.data.files, "MOST_BYTES", SMALL[request.param])


def write_like(path: Path, content: bytes, other: Path | None = None) -> Path:
    """A file with the times of `other`, or of 2020."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(0, 0) if other is None else (0, other.stat().st_mtime_ns))
    return path


@pytest.mark.usefixtures("limit")
def test_files_of_one_name_size_and_time_have_keys_of_their_own(tmp_path):
    one = write_like(tmp_path / "a" / "train", bytes(1000) + b"1")
    same = content_key([one])
    assert content_key([write_like(one, bytes(1000) + b"1")]) == same
    assert content_key([write_like(one, bytes(1000) + b"2")]) != same
    assert content_key([write_like(one, b"2" + bytes(999) + b"1")]) != same
    assert content_key([write_like(tmp_path / "a" / "test", bytes(1000) + b"1")]) != same
    assert content_key([one, one]) != same


def test_a_set_that_was_moved_keeps_its_key_where_all_of_it_is_read(tmp_path):
    keys = {content_key([write_like(tmp_path / place / "train", b"text")]) for place in "ab"}
    assert len(keys) == 1


def test_the_middle_of_a_large_file_is_told_by_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(toolkit.data.files, "MOST_BYTES", 100)
    monkeypatch.setattr(toolkit.data.files, "PART_BYTES", 10)
    one = write_like(tmp_path / "train", bytes(1000))
    before = content_key([one])
    one.write_bytes(bytes(500) + b"1" + bytes(499))
    assert content_key([one]) != before


def test_of_very_many_files_some_are_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(toolkit.data.files, "MOST_BYTES", 10)
    monkeypatch.setattr(toolkit.data.files, "PARTS", 5)
    files = [write_like(tmp_path / str(index), b"text") for index in range(50)]
    opened, really_open = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *how: opened.append(self.name) or really_open(self, *how))
    content_key(files)
    assert 3 <= len(opened) <= 5


def test_a_flipped_bit_in_a_parquet_file_with_checksums_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet as pq

    path = tmp_path / "train.parquet"
    pq.write_table(pyarrow.table({"label": [*range(1000)]}), path, write_page_checksum=True, compression="none")
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path} cannot be read as Parquet"):
        read_columns(path, ["label"])


@pytest.mark.parametrize("missing", range(3))
def test_a_set_that_lacks_a_part_is_refused(tmp_path, missing):
    paths = [tmp_path / f"train-{part:05d}-of-00003.parquet" for part in range(3)]
    assert all_parts(reversed(paths)) == paths
    gone = paths.pop(missing)
    refused = f"is one of 3 parts, and {gone.name} is missing: copy all of them"
    with pytest.raises(UserError, match=refused):
        all_parts(paths)
    for path in paths:
        path.touch()
    with pytest.raises(UserError, match=refused):
        parquet_splits(tmp_path)
    with pytest.raises(UserError, match=refused):
        load_splits(str(tmp_path))
