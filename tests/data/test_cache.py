"""The cache of decoded columns, content keys of files, and missing shards."""

import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from toolkit.data.cache import cached_columns
from toolkit.data.files import all_parts, content_key, parquet_splits
from toolkit.data.rows import load_splits
from toolkit.errors import UserError


@pytest.fixture
def build() -> Mock:
    return Mock(side_effect=lambda: {"input": np.arange(1000, dtype=np.uint8), "label": np.arange(5)})


@pytest.fixture
def entry(cache: Path) -> Path:
    """The file of the cache entry "key"."""
    return cache / "tensors" / "key.safetensors"


def assert_equal(columns: dict[str, torch.Tensor]) -> None:
    assert columns["input"].numpy().tolist() == [n % 256 for n in range(1000)]
    assert columns["label"].tolist() == [0, 1, 2, 3, 4]


def test_columns_are_built_once_and_copied_on_write(entry, build):
    for _ in range(3):
        columns = cached_columns("key", build)
        assert_equal(columns)
        columns["input"].zero_()
    assert build.call_count == 1
    assert [path.name for path in entry.parent.iterdir()] == ["key.safetensors"]
    cached_columns("other", build)
    assert build.call_count == 2


def test_truncated_cache_entry_is_rebuilt(entry, build):
    cached_columns("key", build)
    entry.write_bytes(entry.read_bytes()[:500])
    assert_equal(cached_columns("key", build))
    assert build.call_count == 2


def test_unwritable_cache_folder_is_ignored(tmp_path, monkeypatch, build):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert_equal(cached_columns("key", build))


def test_full_disk_is_ignored(entry, monkeypatch, build):
    monkeypatch.setattr("toolkit.data.cache.save_file", Mock(side_effect=OSError(28, "No space left on device")))
    assert_equal(cached_columns("key", build))
    assert build.call_count == 1
    assert [path for path in entry.parent.iterdir() if path.is_dir()] == []


def test_failed_build_leaves_no_entry(build):
    with pytest.raises(ValueError, match="unreadable"):
        cached_columns("key", Mock(side_effect=ValueError("unreadable")))
    assert_equal(cached_columns("key", build))


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
