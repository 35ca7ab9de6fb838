"""Checkpoint folders that are complete and verified, or not there.

    step-00000100/             a complete checkpoint
    .writing-step-00000100/    a save in progress, or what a killed save left behind
    .removing-step-00000090/   a deletion in progress, or what a killed deletion left behind

A process can be killed, or a machine lose power, between any two operations. Hence their order: the files and their
fsyncs, the manifest and its fsync, the folder's fsync, the rename, the parent's fsync. A checkpoint that verifies is
deleted only after a newer one verifies, or on a full disk if another one that verifies is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from toolkit.progress_bar import progress

NAME, STATE = "manifest.json", "state.json"
WRITING, REMOVING = ".writing-", ".removing-"
LARGEST_MANIFEST = 2**28
"""Size limit in bytes. A larger manifest is not read."""


def seal(file: Path) -> dict[str, Any]:
    """Force `file` to the disk; returns its size in bytes and its digest, as the manifest lists them."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
        return {"bytes": os.fstat(opened.fileno()).st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def publish(writing: Path, final: Path, manifest: dict[str, Any], names: Collection[str] | None = None) -> None:
    """Add the manifest to the sealed files in `writing`, read all files back, and rename the folder to `final`.

    A folder that had this name is deleted afterwards; `recover` completes the rename if the process was killed in
    between.

    Args:
        writing: The folder with the sealed files.
        final: Its name once it is complete.
        manifest: Must have `files`, a mapping of file names to the results of `seal`.
        names: The files on this machine, if others are on other machines.

    Raises:
        OSError: If the bytes read back differ from the bytes written.
    """
    (writing / NAME).write_text(canonical(manifest | {"digest": digest(manifest)}), encoding="utf-8")
    seal(writing / NAME)
    sync(writing)
    if damage := find_damage(writing, names):
        raise OSError(f"{damage} when read back")
    hidden = _hide(final) if final.exists() else None
    writing.rename(final)
    sync(final.parent)
    if hidden is not None:
        shutil.rmtree(hidden)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder`. Raises ValueError or OSError if it is missing or damaged, or names a file of
    another folder."""
    if (size := _size(folder / NAME)) > LARGEST_MANIFEST:
        raise ValueError(f"it has {size:,} bytes")
    text = (folder / NAME).read_text(encoding="utf-8")
    manifest: dict[str, Any] = json.loads(text)
    sealed = dict(manifest)
    if sealed.pop("digest", None) != digest(sealed) or canonical(manifest) != text:
        raise ValueError("it does not match its own digest")
    if any(Path(name).name != name for name in sealed["files"]):
        raise ValueError("it names a file of another folder")
    return sealed


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of state.json in the checkpoint at `path`."""
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def find_damage(folder: Path, names: Collection[str] | None = None) -> str | None:
    """Return the first fault of `folder`, as "<file> <fault>", or None if every byte is unchanged.

    Only regular files are opened, and only if their size is right. `names` restricts the check to these files.
    """
    name = NAME
    try:
        for name, wanted in progress(read_manifest(folder)["files"].items(), "verifying checkpoint"):
            if names is not None and name not in names:
                continue
            if (size := _size(folder / name)) != wanted["bytes"]:
                return f"{name} has {size} bytes instead of {wanted['bytes']}"
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted["sha256"]:
                    return f"{name} does not match its SHA-256"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
    return None


def _size(file: Path) -> int:
    """Bytes of `file`. Raises OSError for a link or a device, without opening it."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is a link or a device, not a regular file")
    return status.st_size


def remove(folder: Path) -> None:
    """Delete `folder` so that it is never seen half deleted."""
    shutil.rmtree(_hide(folder))


def _hide(folder: Path) -> Path:
    hidden = folder.with_name(REMOVING + folder.name)
    shutil.rmtree(hidden, ignore_errors=True)
    return folder.rename(hidden)


def recover(final: Path) -> None:
    """Complete the rename to `final` if the process was killed after it hid the predecessor."""
    writing = final.with_name(WRITING + final.name)
    if not final.exists() and (writing / NAME).exists() and find_damage(writing) is None:
        writing.rename(final)


def sweep(parent: Path) -> None:
    """Delete leftovers of killed processes in `parent`."""
    for prefix in (WRITING, REMOVING):
        for folder in parent.glob(prefix + "*"):
            shutil.rmtree(folder, ignore_errors=True)


def canonical(value: Any) -> str:
    """Return canonical JSON: sorted keys, one form."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest without its own digest."""
    return hashlib.sha256(canonical(manifest).encode()).hexdigest()


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
