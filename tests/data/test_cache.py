"""The cache of decoded columns."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from toolkit.data.cache import cached_columns


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
