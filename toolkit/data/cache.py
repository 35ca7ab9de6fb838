"""Decoded columns on disk: built once, checked, memory-mapped by every process of a machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import filelock
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

BUILD_TIMEOUT_S = 600
"""How long a process waits for another one that is decoding the same data."""


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
