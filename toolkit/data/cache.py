"""Decoded columns on disk: built once, checked, memory-mapped by every process of a machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import filelock
import numpy as np
import torch
from torch import Tensor

DIGESTS = "sha256.json"
BUILD_TIMEOUT_S = 600
"""How long a process waits for another one that is decoding the same data."""


class _Damaged(Exception):
    """An entry is missing or damaged."""


def cache_dir() -> Path:
    """$TOOLKIT_CACHE_DIR, else ~/.cache/moe-toolkit."""
    return Path(os.environ.get("TOOLKIT_CACHE_DIR") or Path.home() / ".cache" / "moe-toolkit")


def cached_columns(key: str, build: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """The arrays that `build` makes, mapped from cache entry `key`; a missing or damaged entry is built first.

    Of several processes one builds. Where the cache folder cannot be written the arrays stay in memory.
    """
    if (columns := mapped_columns(key)) is not None:
        return columns
    folder = cache_dir() / key
    lock = filelock.FileLock(f"{folder}.lock", timeout=BUILD_TIMEOUT_S)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):  # NotImplementedError: a file system without locks
        return _in_memory(build())
    try:
        return _map(folder)  # another process was first
    except _Damaged:
        arrays = build()
        try:
            _write(folder, arrays)
            return _map(folder)
        except (OSError, _Damaged):
            return _in_memory(arrays)
    finally:
        lock.release()


def mapped_columns(key: str) -> dict[str, Tensor] | None:
    """The arrays of cache entry `key`; None where it is missing or damaged."""
    try:
        return _map(cache_dir() / key)
    except _Damaged:
        return None


def _in_memory(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _map(folder: Path) -> dict[str, Tensor]:
    """The columns of the entry `folder`, which must be whole, and written under this key."""
    try:
        about = json.loads((folder / DIGESTS).read_text())
        if about["key"] != folder.name:
            raise _Damaged(folder)
        columns = {}
        for name, digest in about["columns"].items():
            path = folder / f"{name}.npy"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise _Damaged(path)
            # Copy-on-write costs nothing without writes, and avoids torch's warning about read-only memory.
            columns[name] = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        return columns
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Damaged(folder) from error


def _write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an entry under a temporary name and rename it, so that an entry is whole or absent."""
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        digests = {}
        for name, array in arrays.items():
            with (partial / f"{name}.npy").open("w+b") as file:
                np.save(file, array, allow_pickle=False)
                file.seek(0)
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        (partial / DIGESTS).write_text(json.dumps({"key": folder.name, "columns": digests}))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
