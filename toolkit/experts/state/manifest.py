"""Folders that are complete and verified, or not there.

    step-00000100/             what readers see
    .writing-step-00000100/    a save in progress, or what a killed one left behind
    .removing-step-00000090/   a deletion in progress, likewise

A process may be killed, or a machine lose power, between any two operations. Hence their order: the files and their
fsyncs, the manifest and its fsync, the folder's fsync, the rename, the parent's fsync. Nothing that verifies is deleted
before something newer verifies; on a full disk, all but the newest of several that verify.
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

NAME = "manifest.json"
WRITING, REMOVING = ".writing-", ".removing-"
LARGEST_MANIFEST = 2**28
"""Bytes. A larger file is not read."""


def seal(file: Path) -> dict[str, Any]:
    """Force `file` to the disk; returns its size in bytes and its digest, as the manifest lists them."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
        return {"bytes": os.fstat(opened.fileno()).st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def write_canonical(file: Path, value: Any) -> None:
    """Write `value` in the one form that `read_canonical` accepts."""
    file.write_text(_canonical(value), encoding="utf-8")


def read_canonical(file: Path) -> Any:
    """Returns what `write_canonical` wrote. Raises ValueError where the text is not exactly that."""
    text = file.read_text(encoding="utf-8")
    value = json.loads(text)
    if _canonical(value) != text:
        raise ValueError("it was altered")
    return value


def publish(writing: Path, final: Path, manifest: dict[str, Any], names: Collection[str] | None = None) -> None:
    """Add the manifest to the sealed files in `writing`, read all of it back, and give the folder its `final` name.

    `names` are the files that are there, where others are on other machines.

    A folder that had that name is deleted afterwards; `recover` completes the rename where the process was killed in
    between. Raises OSError where what is read differs from what was written.
    """
    write_canonical(writing / NAME, manifest | {"digest": digest(manifest)})
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
    """The manifest of `folder`. Raises ValueError or OSError where it is missing or damaged, or of another shape.

    Of what it returns every file lies in `folder` itself, and `rows` and `placement`, if any, name the same rows.
    """
    if (size := _size(folder / NAME)) > LARGEST_MANIFEST:
        raise ValueError(f"it has {size:,} bytes")
    manifest = read_canonical(folder / NAME)
    if not isinstance(manifest, dict) or manifest.pop("digest", None) != digest(manifest):
        raise ValueError("it does not match its own digest")
    try:
        _check_shape(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no manifest of a checkpoint: {error}") from None
    return manifest


def _check_shape(manifest: dict[str, Any]) -> None:
    """Raise an exception unless `manifest` has the fields of a checkpoint's manifest, of their types."""
    if not isinstance(manifest["format"], int) or not isinstance(manifest["step"], int | None):
        raise TypeError("its format or step is no number")
    for name, wanted in manifest["files"].items():
        if Path(name).name != name or name == ".." or "\0" in name:
            raise ValueError(f"{name!r} is no file of this folder")
        if not isinstance(wanted["bytes"], int) or not isinstance(wanted["sha256"], str):
            raise TypeError(f"the size or digest of {name!r} is of another type")
    written: dict[str, set[int]] = {}
    for by_parameter in manifest["rows"].values():
        for parameter, row_ids in by_parameter.items():
            written.setdefault(parameter, set()).update(row_ids)
    if "placement" in manifest:
        slots = {name: place["slots"] for name, place in manifest["placement"].items()}
        placed = {name: {row for rank in ranks for row in rank if row >= 0} for name, ranks in slots.items()}
        if placed != written:
            raise ValueError("its placement has other rows than its files")
        of_module: dict[str, Any] = {}
        if any(of_module.setdefault(name.rpartition(".")[0], ranks) != ranks for name, ranks in slots.items()):
            raise ValueError("its placement has the experts of one layer in several orders")


def find_damage(folder: Path, names: Collection[str] | None = None) -> str | None:
    """Returns what is wrong with `folder`, as "<file> <what>", or None where every byte is as it was written.

    Only regular files are opened, and only where their size is right; of the files only `names`, if given.
    """
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return f"{NAME} is missing"
    except (OSError, ValueError) as error:
        return f"{NAME} cannot be read ({error})"
    for name, wanted in manifest["files"].items():
        if names is not None and name not in names:
            continue
        try:
            size = _size(folder / name)
            if size != wanted["bytes"]:
                return f"{name} has {size} bytes instead of {wanted['bytes']}"
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted["sha256"]:
                    return f"{name} does not match its SHA-256"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
    return None


def _size(file: Path) -> int:
    """Bytes of `file`. Raises OSError for a link or a device, of which the size says nothing, without opening it."""
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
    """Complete the rename to `final` where the process was killed after hiding its predecessor."""
    writing = final.with_name(WRITING + final.name)
    if not final.exists() and (writing / NAME).exists() and find_damage(writing) is None:
        writing.rename(final)


def sweep(parent: Path) -> None:
    """Delete what killed processes left behind in `parent`."""
    for prefix in (WRITING, REMOVING):
        for folder in parent.glob(prefix + "*"):
            shutil.rmtree(folder, ignore_errors=True)


def _canonical(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def digest(value: dict[str, Any]) -> str:
    """SHA-256 of `value` as JSON."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
