"""Decoded columns on disk, built once and memory-mapped by every process of a machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor


class OnMain(Protocol):
    """`Run.on_main_and_share`: runs a function on the main process; its result, or UserError, reaches every rank."""

    def __call__(self, decide: Callable[[], Any], /) -> Any: ...


@dataclass(frozen=True)
class Source:
    """A data set that was found and is not yet read."""

    name: str
    key: str
    """Changes when its content does."""
    read: Callable[[], Mapping[str, np.ndarray]]
    """Decodes it into columns."""
    notice: str | None = None
    """A sentence for the user, when this is not the set that was asked for, or how it was split."""


def shared_columns(find: Callable[[], Source], on_main: OnMain) -> tuple[str, str | None, dict[str, Tensor]]:
    """Find a data set on the main process, decode it there, and map the columns on every process.

    Args:
        find: Finds the set; where a process does not see the main one's cache it is called there, too.
        on_main: `Run.on_main_and_share`.

    Returns:
        The name of the set, its notice, and its columns.

    Raises:
        UserError: On every rank, what `find` or the reading raises.
    """
    columns: dict[str, Tensor] = {}

    def build() -> tuple[str, str, str | None]:
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
    """Words without line breaks as a column of bytes, which `words_of` reads."""
    return np.frombuffer("\n".join(words).encode(), np.uint8).copy()


def words_of(column: Tensor) -> tuple[str, ...]:
    """The words of a column that `words_column` made."""
    return tuple(bytes(column.numpy()).decode().split("\n"))


def cache_dir() -> Path:
    """$TOOLKIT_CACHE_DIR, else ~/.cache/moe-toolkit."""
    return Path(os.environ.get("TOOLKIT_CACHE_DIR") or Path.home() / ".cache" / "moe-toolkit")


def cached_columns(key: str, build: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """Return the arrays of cache entry `key`, memory-mapped, after building and writing a missing entry.

    The arrays stay in memory if the cache folder cannot be written.
    """
    if (columns := mapped_columns(key)) is not None:
        return columns
    arrays = {name: np.ascontiguousarray(array) for name, array in build().items()}
    path = _entry(key)
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
        return load_file(_entry(key))
    except (OSError, SafetensorError):
        return None


def _entry(key: str) -> Path:
    return cache_dir() / f"{key}.safetensors"
