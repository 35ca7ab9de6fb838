"""Copies of a run's files on a bucket or another machine, at a URI that fsspec knows (`--storage`).

A checkpoint's manifest is written last and removed first, so that a copy is complete or not there. Other files are
replaced whole. `toolkit.checkpoint.finding` copies checkpoints, of which each machine may hold a part.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from toolkit.errors import UserError, one_line

T = TypeVar("T")

CHECKPOINTS = "checkpoints"


class Storage:
    """The folder `uri`, such as s3://bucket/run; its methods take paths within it. Raises UserError where fsspec cannot
    use it, and OSError from methods where it does not answer."""

    def __init__(self, uri: str):
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        self.uri = uri
        try:
            self._files, self._root = url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise UserError(f"storage={uri}: cannot be used ({one_line(error)}).") from None
        self._is_local = isinstance(self._files, LocalFileSystem)

    def _at(self, path: str) -> str:
        return posixpath.join(self._root, path) if path else self._root

    def _try(self, work: Callable[[], T]) -> T:
        """The result of `work`; whatever a store raises becomes an OSError, but for a file that is not there."""
        try:
            return work()
        except OSError:
            raise
        except Exception as error:  # botocore, aiohttp and gcsfs have their own, without a common base
            raise OSError(f"{self.uri}: {type(error).__name__}: {error}") from error

    def put(self, file: Path, path: str) -> None:
        """Copy `file` there, whole or not at all."""

        def copy() -> None:
            target = self._at(path)
            if not self._is_local:  # a bucket shows an object when all of it has arrived
                self._files.put_file(str(file), target)
                return
            self._files.makedirs(posixpath.dirname(target), exist_ok=True)
            self._files.put_file(str(file), f"{target}.partial")
            self._files.mv(f"{target}.partial", target)

        self._try(copy)

    def get(self, path: str, file: Path) -> None:
        """Copy what is there to `file`, whole or not at all. Raises FileNotFoundError where nothing is."""
        partial = file.with_name(f".{file.name}.partial")
        partial.unlink(missing_ok=True)  # a link would be followed
        self._try(lambda: self._files.get_file(self._at(path), str(partial)))
        partial.replace(file)

    def read(self, path: str) -> bytes:
        return self._try(lambda: self._files.cat_file(self._at(path)))

    def names(self, path: str = "", kind: str = "file") -> list[str]:
        """Names of the files, or folders (`kind` "directory"), in the folder `path`; none where it is not there."""

        def listing() -> list[str]:
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(self._at(path), detail=True)
            except FileNotFoundError:
                return []
            return sorted(posixpath.basename(e["name"].rstrip("/")) for e in entries if e["type"] == kind)

        return self._try(listing)

    def remove(self, path: str, first: str) -> None:
        """Delete the folder `path`, the file `first` before all others."""

        def delete() -> None:
            if first in self.names(path):
                self._files.rm_file(self._at(posixpath.join(path, first)))
            self._files.rm(self._at(path), recursive=True)

        self._try(delete)

    # --- the files of a run -----------------------------------------------------------------------------------

    def put_run(self, folder: Path) -> None:
        """Copy the files of a run there, without its checkpoints and other folders."""
        for file in _files_of(folder):
            self.put(file, file.name)

    def put_finished(self, folder: Path, say: Callable[[str], None]) -> None:
        """`put_run`; where the storage does not answer, `say` is told."""
        try:
            self.put_run(folder)
        except OSError as error:
            say(f"warning: the storage {self.uri} lacks the last files of {folder}: {error}.")

    def get_run(self, folder: Path) -> None:
        """Copy the files of a run into `folder`, unless its own checkpoints are newer, as after copies that failed."""
        local = newest_step(path.name for path in (folder / CHECKPOINTS).glob("step-*"))
        if newest_step(self.names(CHECKPOINTS, "directory")) >= local:
            for name in self.names():
                if not name.startswith("."):
                    self.get(name, folder / name)


def newest_step(names: Iterable[str]) -> int:
    """The greatest step among the names of checkpoints; -1 where there are none."""
    steps = (name.removeprefix("step-") for name in names)
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


def _files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
