"""The cache of decoded columns: built once, checked, mapped, never in the way."""

from pathlib import Path

import numpy as np
import pytest

from toolkit.data.cache import cached_columns


class Builder:
    """Makes the same columns each time and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"input": np.arange(1000, dtype=np.uint8), "label": np.arange(5)}


@pytest.fixture
def entry(cache: Path) -> Path:
    """Where the entry "key" lies."""
    return cache / "tensors" / "key.safetensors"


def assert_right(columns: dict) -> None:
    assert columns["input"].numpy().tolist() == [n % 256 for n in range(1000)]
    assert columns["label"].tolist() == [0, 1, 2, 3, 4]


def test_columns_are_built_once_and_then_mapped(entry):
    build = Builder()
    for _ in range(3):
        assert_right(cached_columns("key", build))
    assert build.calls == 1
    assert [path.name for path in entry.parent.iterdir()] == ["key.safetensors"]


def test_another_key_is_another_entry():
    build = Builder()
    cached_columns("key", build)
    cached_columns("other", build)
    assert build.calls == 2


def test_writing_to_a_mapped_column_leaves_the_entry_alone():
    build = Builder()
    cached_columns("key", build)["input"].zero_()
    assert_right(cached_columns("key", build))
    assert build.calls == 1


def test_cached_columns_truncated_entry_is_rebuilt(entry):
    build = Builder()
    cached_columns("key", build)
    entry.write_bytes(entry.read_bytes()[:500])
    assert_right(cached_columns("key", build))
    assert build.calls == 2


def test_a_folder_that_cannot_be_made_costs_the_cache_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert_right(cached_columns("key", Builder()))


def test_a_full_disk_costs_the_cache_and_nothing_else(entry, monkeypatch):
    def no_space(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("toolkit.data.cache.save_file", no_space)
    build = Builder()
    assert_right(cached_columns("key", build))
    assert build.calls == 1
    assert [path for path in entry.parent.iterdir() if path.is_dir()] == []


def test_an_error_while_building_leaves_no_entry_and_no_lock():
    def fail() -> dict[str, np.ndarray]:
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        cached_columns("key", fail)
    assert_right(cached_columns("key", Builder()))
