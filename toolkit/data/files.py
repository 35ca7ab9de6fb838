"""Files of a data set: their paths, a key that changes with their content, and Parquet columns."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, reading

SPLITS = ("train", "test")
"""Names of the two splits that every data set has."""


class NotFoundHere(Exception):
    """A place does not hold the data set. The message is a clause that names the place and the reason."""


def data_folder(data_dir: str | Path | None) -> Path:
    """Return `data_dir`, else $TOOLKIT_DATA_DIR. Raises NotFoundHere if neither is set."""
    folder = data_dir or os.environ.get("TOOLKIT_DATA_DIR")
    if not folder:
        raise NotFoundHere("there is no data_dir and no $TOOLKIT_DATA_DIR")
    return Path(folder).expanduser()


def parquet_splits(folder: Path) -> dict[str, list[Path]] | None:
    """Return the Parquet files of "train" and "test", named as on the Hub; None if either split has no file."""
    files = {split: all_parts(folder.glob(f"{split}-*.parquet")) for split in SPLITS}
    return files if all(files.values()) else None


def all_parts(paths: Iterable[Path]) -> list[Path]:
    """Sort `paths`. Raises UserError if a shard, such as -00001-of-00003, is missing."""
    files = sorted(paths)
    for path in files:
        if part := re.fullmatch(r"(.*-)\d{5}(-of-(\d{5}).*)", path.name):
            names = (f"{part[1]}{number:05d}{part[2]}" for number in range(int(part[3])))
            if missing := next((name for name in names if path.with_name(name) not in files), None):
                raise UserError(f"{path} is one of {int(part[3])} parts, and {missing} is missing. Copy all of them.")
    return files


def content_key(paths: Iterable[Path]) -> str:
    """Return a key of 16 hex digits that changes with the path, size or modification time of a file."""
    stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def read_file(path: str | Path, *folders: Path) -> bytes:
    """Read a file that a data set names.

    Args:
        path: The file.
        folders: Folders that may have it.

    Raises:
        UserError: `path` is outside `folders`, or is a pipe or a device, which could block.
    """
    place = Path(os.path.abspath(path))  # a link within the folders may lead to another disk
    if not any(place.is_relative_to(folder.absolute()) for folder in folders):
        raise UserError(f"{path}: is outside the folder of the data set. Move it there.")
    if not place.is_file():
        raise UserError(f"{path}: is not a file. Correct its name.")
    return place.read_bytes()


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Read the columns `names` of a Parquet file; images and audio are dicts with their encoded `bytes`.

    Raises:
        UserError: `datasets` cannot read the file, or a column is missing.
    """
    import datasets

    with reading(path, "Replace the file."):
        rows = datasets.Dataset.from_parquet(str(path), columns=list(names))
        return rows.with_format("arrow")[:].to_pydict()


def damaged(path: Path, fault: str) -> UserError:
    """Build the error for an invalid file."""
    return UserError(f"{path} {fault}: replace the file, or let data_dir name another one.")
