"""Keys of files, and sets that lack a part."""

import os
from pathlib import Path

import pytest

from toolkit.data.files import all_parts, content_key, parquet_splits
from toolkit.data.rows import load_splits
from toolkit.errors import UserError


def write_like(path: Path, content: bytes, other: Path | None = None) -> Path:
    """A file with the times of `other`, or of 2020."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(0, 0) if other is None else (0, other.stat().st_mtime_ns))
    return path


def test_content_key_other_name_size_or_time_differs(tmp_path):
    one = write_like(tmp_path / "a" / "train", bytes(1000))
    same = content_key([one])
    assert content_key([one]) == same
    assert content_key([write_like(tmp_path / "a" / "test", bytes(1000))]) != same
    assert content_key([one, one]) != same
    assert content_key([write_like(one, bytes(1001))]) != same
    one.write_bytes(bytes(1000))
    assert content_key([one]) != same


@pytest.mark.parametrize("missing", range(3))
def test_a_set_that_lacks_a_part_is_refused(tmp_path, missing):
    paths = [tmp_path / f"train-{part:05d}-of-00003.parquet" for part in range(3)]
    assert all_parts(reversed(paths)) == paths
    gone = paths.pop(missing)
    refused = f"is one of 3 parts, and {gone.name} is missing. Copy all of them"
    with pytest.raises(UserError, match=refused):
        all_parts(paths)
    for path in paths:
        path.touch()
    with pytest.raises(UserError, match=refused):
        parquet_splits(tmp_path)
    with pytest.raises(UserError, match=refused):
        load_splits(str(tmp_path))
