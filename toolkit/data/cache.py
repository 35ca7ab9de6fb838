"""On-disk cache of decoded columns, built once and memory-mapped by every rank of a node."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from toolkit.errors import reading

REMEDY = "Check the files."


OnMain = Callable[[Callable[[], Any]], Any]
"""`Run.on_main_and_share`: run a function on the main process and broadcast its result or its UserError."""


@dataclass(frozen=True)
class Source:
    """A data set that is found but not yet read."""

    name: str
    key: str
    """Cache key, which changes with the content."""
    read: Callable[[], Mapping[str, np.ndarray]]
    """Function that decodes the data set into columns."""
    notice: str | None = None
    """Message for the user if another data set was loaded, or if a split was drawn."""


def shared_columns(
    dataset: str, find: Callable[[], Source], on_main: OnMain
) -> tuple[str, str | None, dict[str, Tensor]]:
    """Find and decode a data set on the main process, and memory-map its columns on every rank.

    Args:
        dataset: The data set as given by the user, for error messages.
        find: Function that finds the data set. Ranks that cannot read the main process's cache call it too.
        on_main: `Run.on_main_and_share`.

    Returns:
        Name, notice and columns of the data set.

    Raises:
        UserError: The data set cannot be found or read; raised on every rank.
    """
    columns: dict[str, Tensor] = {}

    def build() -> tuple[str, str, str | None]:
        with reading(f"dataset={dataset!r}", REMEDY):
            source = find()
            columns.update(cached_columns(source.key, source.read))
        return source.name, source.key, source.notice

    name, key, notice = on_main(build)
    if not columns:
        columns.update(mapped_columns(key) or {})
    if not columns:
        build()
    return name, notice, columns


def words_column(words: Sequence[str]) -> np.ndarray:
    """Encode words without line breaks as a column of bytes for `words_of`."""
    return np.frombuffer("\n".join(words).encode(), np.uint8).copy()


def words_of(column: Tensor) -> tuple[str, ...]:
    """Decode the words of a column from `words_column`."""
    return tuple(bytes(column.numpy()).decode().split("\n"))


def cache_dir() -> Path:
    """Return $TOOLKIT_CACHE_DIR, else ~/.cache/moe-toolkit."""
    return Path(os.environ.get("TOOLKIT_CACHE_DIR") or Path.home() / ".cache" / "moe-toolkit")


def cached_columns(key: str, build: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """Return the arrays of cache entry `key`, memory-mapped, after building and writing a missing entry.

    The arrays stay in memory if the cache folder cannot be written.
    """
    if (columns := mapped_columns(key)) is not None:
        return columns
    arrays = {name: np.ascontiguousarray(array) for name, array in build().items()}
    path = cache_dir() / f"{key}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=path.stem, dir=path.parent) as folder:
            save_file(arrays, Path(folder) / path.name)
            (Path(folder) / path.name).rename(path)  # readers see a complete file or none
    except (OSError, SafetensorError):
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return load_file(path)


def mapped_columns(key: str) -> dict[str, Tensor] | None:
    """Return the arrays of cache entry `key`, copied on write; None for a missing or damaged entry."""
    try:
        return load_file(cache_dir() / f"{key}.safetensors")
    except (OSError, SafetensorError):
        return None
