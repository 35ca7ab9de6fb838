"""Remote storage of a run's files at an fsspec URI (`--storage`), such as a bucket.

The manifest of a checkpoint is written last and deleted first, so partial copies have no manifest. Other files are
replaced atomically. `toolkit.checkpoint.finding` copies checkpoints, which can be split over machines.
"""

from __future__ import annotations

import errno
import json
import posixpath
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import one_line, printable

CHECKPOINTS = "checkpoints"


class Storage:
    """A folder at `uri`, such as s3://bucket/run. Methods take relative paths and raise OSError if storage fails."""

    def __init__(self, uri: str):
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        self.uri = printable(uri)
        with self._errors_of_the_system():  # such as a file system that is not installed
            self._files, self._root = url_to_fs(uri)
        self._is_local = isinstance(self._files, LocalFileSystem)

    @contextmanager
    def _errors_of_the_system(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # botocore, aiohttp and gcsfs errors have no common base class
            raise OSError(errno.EIO, one_line(error), self.uri) from error

    def put(self, file: Path, path: str) -> None:
        """Upload `file` atomically."""
        target = posixpath.join(self._root, path)
        with self._errors_of_the_system():
            if not self._is_local:  # a bucket shows an object once it is complete
                self._files.put_file(str(file), target)
                return
            self._files.makedirs(posixpath.dirname(target), exist_ok=True)
            self._files.put_file(str(file), f"{target}.partial")
            self._files.mv(f"{target}.partial", target)

    def get(self, path: str, file: Path) -> None:
        """Download to `file` atomically. Raises FileNotFoundError if `path` does not exist."""
        partial = file.with_name(f".{file.name}.partial")
        partial.unlink(missing_ok=True)  # a link would be followed
        with self._errors_of_the_system():
            self._files.get_file(posixpath.join(self._root, path), str(partial))
        partial.replace(file)

    def names(self, path: str = "", kind: str = "file") -> list[str]:
        """List the files, or folders (`kind` "directory"), in the folder `path`; empty if it does not exist."""
        with self._errors_of_the_system():
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(posixpath.join(self._root, path).rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
            names = (posixpath.basename(e["name"].rstrip("/")) for e in entries if e["type"] == kind)
            return sorted(name for name in names if not name.endswith(".partial"))  # of uploads that were killed

    def remove(self, path: str, first: str) -> None:
        """Delete the folder `path`, the file `first` before all others."""
        target = posixpath.join(self._root, path)
        with self._errors_of_the_system():
            if first in self.names(path):
                self._files.rm_file(posixpath.join(target, first))
            self._files.rm(target, recursive=True)

    # --- the files of a run -----------------------------------------------------------------------------------

    def put_run(self, folder: Path) -> None:
        """Upload the files of a run, without its checkpoints and other folders."""
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                self.put(file, file.name)

    def put_finished(self, folder: Path, say: Callable[[str], None]) -> None:
        """Call `put_run`, with a warning if the storage fails."""
        try:
            self.put_run(folder)
        except OSError as error:
            say(f"warning: the storage {self.uri} lacks the last files of {folder}: {error}.")

    def get_run(self, folder: Path) -> None:
        """Download files that are missing or damaged in `folder`; all files if its checkpoints are older."""
        local = _newest_step(path.name for path in (folder / CHECKPOINTS).glob("step-*"))
        is_older = local < _newest_step(self.names(CHECKPOINTS, "directory"))
        for name in self.names():
            if not name.startswith(".") and (is_older or not _is_whole(folder / name)):
                self.get(name, folder / name)


def _is_whole(file: Path) -> bool:
    """Return whether `file` exists and is valid JSON or JSON lines, if it is either. The last line is not checked,
    because a kill can truncate it."""
    if not file.is_file() or file.is_symlink():
        return False
    try:
        texts = {".json": [file.read_bytes()], ".jsonl": file.read_bytes().splitlines()[:-1]}
        for text in texts.get(file.suffix, ()):
            json.loads(text)
    except ValueError:
        return False
    return True


def _newest_step(names: Iterable[str]) -> int:
    """Return the highest step among the names of checkpoints; -1 if there are none."""
    steps = (name.removeprefix("step-") for name in names)
    return max((int(step) for step in steps if step.isdecimal()), default=-1)
