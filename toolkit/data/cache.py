"""Decoded columns on disk: built once, checked, memory-mapped by every process of a machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import filelock
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

BUILD_TIMEOUT_S = 600
"""How long a process waits for another one that is decoding the same data."""


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
    """The arrays that `build` makes, mapped from cache entry `key`; a missing or damaged entry is built first.

    Of several processes one builds. Where the cache folder cannot be written the arrays stay in memory.
    """
    if (columns := mapped_columns(key)) is not None:
        return columns
    path = _entry(key)
    lock = filelock.FileLock(f"{path}.lock", timeout=BUILD_TIMEOUT_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):  # NotImplementedError: a file system without locks
        return _in_memory(build())
    try:
        if (columns := mapped_columns(key)) is not None:  # another process was first
            return columns
        arrays = build()
        try:
            _write(path, arrays)
        except (OSError, SafetensorError):
            return _in_memory(arrays)
        return mapped_columns(key) or _in_memory(arrays)
    finally:
        lock.release()


def mapped_columns(key: str) -> dict[str, Tensor] | None:
    """The arrays of cache entry `key`, copied where they are written to; None where it is missing or damaged."""
    path = _entry(key)
    try:
        if path.with_suffix(".sha256").read_text() == _digest(path):
            return load_file(path)
    except (OSError, SafetensorError):
        pass
    return None


def _entry(key: str) -> Path:
    return cache_dir() / f"{key}.safetensors"


def _in_memory(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an entry under a temporary name and rename it, so that readers see all of it or nothing."""
    with tempfile.TemporaryDirectory(prefix=path.stem, dir=path.parent) as folder:
        partial = Path(folder) / path.name
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial)
        digest = _digest(partial)
        partial.rename(path)
        path.with_suffix(".sha256").write_text(digest)


def _digest(path: Path) -> str:
    """The SHA-256 of name and content, so that an entry is known by its key."""
    with path.open("rb") as file:
        return hashlib.sha256(path.name.encode() + hashlib.file_digest(file, "sha256").digest()).hexdigest()
