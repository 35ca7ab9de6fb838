"""The files of a data set: where they lie, a key that changes with their content, and Parquet columns."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, one_line

SPLITS = ("train", "test")
MOST_BYTES = 2**27
"""Files of together at most 128 MiB are read whole for their key."""
PART_BYTES = 2**16
PARTS = 1000
"""The key of larger sets takes the first and last 64 KiB of at most so many files, spread evenly over the list."""


class NotFoundHere(Exception):
    """A place does not have the set; the message names the place and the reason, as part of a sentence."""


def data_folder(data_dir: Path | None) -> Path:
    """`data_dir`, else the folder that $TOOLKIT_DATA_DIR names. Raises NotFoundHere where there is neither."""
    folder = data_dir or os.environ.get("TOOLKIT_DATA_DIR")
    if not folder:
        raise NotFoundHere("there is no data_dir and no $TOOLKIT_DATA_DIR")
    return Path(folder).expanduser()


def parquet_splits(folder: Path) -> dict[str, list[Path]] | None:
    """The Parquet files of "train" and "test", named as on the Hub; None where `folder` lacks those of either."""
    files = {split: all_parts(folder.glob(f"{split}-*.parquet")) for split in SPLITS}
    return files if all(files.values()) else None


def all_parts(paths: Iterable[Path]) -> list[Path]:
    """The sorted `paths`. Raises UserError where one is a part, such as -00001-of-00003, and another is missing."""
    files = sorted(paths)
    for path in files:
        if part := re.fullmatch(r"(.*-)\d{5}(-of-(\d{5}).*)", path.name):
            names = (f"{part[1]}{number:05d}{part[2]}" for number in range(int(part[3])))
            if missing := next((name for name in names if path.with_name(name) not in files), None):
                raise UserError(f"{path} is one of {int(part[3])} parts, and {missing} is missing: copy all of them.")
    return files


def content_key(paths: Iterable[Path]) -> str:
    """Returns 16 digits that change with names and content of the files `paths`.

    Sets larger than `MOST_BYTES` are not read whole: of these the path, size and modification time of each file count
    instead of its name, and the first and last bytes of some. Raises UserError for a file that cannot be read.
    """
    files = [*paths]
    key = hashlib.sha256()
    try:
        sizes = [path.stat().st_size for path in files]
        whole = sum(sizes) <= MOST_BYTES
        for index, (path, size) in enumerate(zip(files, sizes, strict=True)):
            name = path.name if whole else (str(path.absolute()), path.stat().st_mtime_ns)
            key.update(repr((name, size)).encode())
            if whole:
                key.update(path.read_bytes())
            elif index % (len(files) // PARTS + 1) == 0:
                with path.open("rb") as file:
                    key.update(file.read(PART_BYTES))
                    file.seek(max(0, size - PART_BYTES))
                    key.update(file.read(PART_BYTES))
    except OSError as error:
        raise unreadable(error) from None
    return key.hexdigest()[:16]


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Read columns of one Parquet file.

    Args:
        path: The file.
        names: Its columns to read.

    Returns:
        The values by column; images and audio are dicts with their encoded `bytes`.

    Raises:
        UserError: The file is damaged or has no rows, or a column is not there.
    """
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        missing = set(names) - set(file.schema_arrow.names)
        columns = None if missing else file.read(list(names)).to_pydict()
    # Apache Arrow raises its own kinds for a file that is damaged.
    except Exception as error:
        raise damaged(path, f"cannot be read as Parquet ({one_line(error)})") from None
    if columns is None:
        raise damaged(path, f"has no column {' and '.join(sorted(missing))}")
    if not file.metadata.num_rows:
        raise damaged(path, "has no rows")
    return {name: columns[name] for name in names}


def unreadable(error: OSError) -> UserError:
    """The error for a file or folder that the system does not let us read."""
    return UserError(f"{error.filename} cannot be read ({error.strerror}): check permissions.")


def damaged(path: Path, fault: str) -> UserError:
    """The error for an invalid file."""
    return UserError(f"{path} {fault}: replace the file, or let data_dir name another one.")
