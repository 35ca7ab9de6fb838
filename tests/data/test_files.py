"""Content keys of files, and missing shards."""

import os
from pathlib import Path

import pytest

from toolkit.data.files import all_parts, content_key, parquet_splits
from toolkit.data.rows import load_splits
from toolkit.errors import UserError


def write(path: Path, content: bytes) -> Path:
    """Write a file with a constant modification time."""
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    return path


def test_content_key_depends_on_path_size_and_time(tmp_path):
    file = write(tmp_path / "train", bytes(1000))
    key = content_key([file])
    assert content_key([file]) == key
    assert content_key([write(tmp_path / "test", bytes(1000))]) != key
    assert content_key([file, file]) != key
    assert content_key([write(file, bytes(1001))]) != key
    file.write_bytes(bytes(1000))
    assert content_key([file]) != key


@pytest.mark.parametrize("missing", range(3))
def test_missing_shard_raises(tmp_path, missing):
    paths = [tmp_path / f"train-{part:05d}-of-00003.parquet" for part in range(3)]
    assert all_parts(reversed(paths)) == paths
    lost = paths.pop(missing)
    for path in paths:
        path.touch()
    for call in (lambda: all_parts(paths), lambda: parquet_splits(tmp_path), lambda: load_splits(str(tmp_path))):
        with pytest.raises(UserError, match=f"is one of 3 parts, and {lost.name} is missing. Copy all of them"):
            call()
