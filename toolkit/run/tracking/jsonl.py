"""metrics.jsonl: one JSON object per log step, the source of plots and tables."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MOST_STEPS = 2**31 - 1
"""Maximum of int32 in plots."""


class MetricsFile:
    """Append-only metrics file. Each line is flushed, so a kill loses at most the line in progress.

    Steps ascend. A run that resumes from an earlier step first removes the lines after that step. While the disk is
    full, lines are buffered in memory. `restore` rewrites a deleted file. `say` gets one warning for each of these, and
    for unreadable or changed lines.
    """

    def __init__(self, path: Path, say: Callable[[str], None]):
        self.path, self._say = path, say
        self._file = path.open("a+b", buffering=0)
        self._unwritten = b""
        self._told: set[str] = set()
        self._content = hashlib.sha256()
        self._bytes = 0
        self._cut_before_append = path.stat().st_size > 0

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line. After a restart, the first call removes the lines of earlier processes from this step on."""
        if self._cut_before_append:
            self.truncate(step - 1)
        line = to_json({"step": step, **values}).encode() + b"\n"
        self._unwritten += line
        self._content.update(line)
        self._bytes += len(line)
        self._write()
        if not self._is_in_place():
            self._tell(f"warning: {self.path} was removed or replaced: it is written again when the run ends.")

    def seal(self) -> dict[str, Any]:
        """Return the size and digest of all lines, for `truncate` to verify."""
        return {"bytes": self._bytes, "sha256": self._content.hexdigest()}

    def truncate(self, step: int, seal: Mapping[str, Any] | None = None) -> None:
        """Remove the lines after `step`, and an incomplete last line.

        `seal` covers the lines up to `step`, possibly without the last one.
        """
        self._cut_before_append = False
        end = place = 0
        damaged = []
        # Use the open file, because its path may no longer be writable.
        self._file.seek(0)
        content = self._file.read()
        for number, line in enumerate(io.BytesIO(content), start=1):
            place += len(line)
            record = _parse(line)
            if record is None:
                damaged.append(number)
            elif record["step"] > step:
                break
            else:
                end, last = place, number
        if inside := [str(number) for number in damaged if end and number < last]:
            self._tell(f"warning: {self.path}: line {', '.join(inside)} cannot be read; tables and plots leave it out.")
        self._file.truncate(end)
        content = content[:end]
        self._content, self._bytes = hashlib.sha256(content), end
        if seal is None or inside:
            return
        if hashlib.sha256(content[: seal["bytes"]]).hexdigest() != seal["sha256"]:
            self._tell(
                f"warning: {self.path}: lines up to step {step} were damaged, changed or lost after they were written; "
                "tables and plots show the others."
            )

    def restore(self) -> None:
        """Rewrite the file if it was removed."""
        if self._is_in_place():
            return
        self._file.seek(0)
        content = self._file.read()
        self._file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w+b", buffering=0)
        self._unwritten = content + self._unwritten
        self._write()

    def close(self) -> None:
        """Write buffered lines, if they fit, and close the file."""
        try:
            self.restore()
            self._write()
            if self._unwritten:
                lines = self._unwritten.count(b"\n")
                self._say(f"warning: the last {lines} line(s) of {self.path} are lost: there is no room for them.")
        except OSError as error:
            self._say(f"warning: {self.path} is incomplete: {error}.")
        self._file.close()

    def _write(self) -> None:
        """Write as much as fits. The next call continues with the rest, possibly in the middle of a line."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            self._tell(
                f"warning: {self.path} cannot be written ({error.strerror}): training goes on, and lines are kept in "
                "memory until there is room."
            )

    def _is_in_place(self) -> bool:
        """Return whether the path still points to the open file."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _tell(self, warning: str) -> None:
        if warning not in self._told:
            self._told.add(warning)
            self._say(warning)


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a metrics file in order, if it exists."""
    if Path(path).exists():
        with Path(path).open("rb") as lines:
            yield from (record for line in lines if (record := _parse(line)) is not None)


def last_tables(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the last table (list of rows) logged under each `eval/` name, such as `eval/confusion`."""
    return {
        name: value
        for line in lines
        for name, value in line.items()
        if name.startswith("eval/") and isinstance(value, list) and value and isinstance(value[0], list)
    }


def unreadable_lines(path: Path) -> list[int]:
    """Return the line numbers, from 1, that `read_metrics` skips, except an incomplete last line."""
    if not path.exists():
        return []
    with path.open("rb") as lines:
        return [i for i, line in enumerate(lines, start=1) if line.endswith(b"\n") and _parse(line) is None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is incomplete or invalid."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = from_json(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and abs(step) <= MOST_STEPS else None


def from_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if `text` is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_json(value: Any, indent: int | None = None) -> str:
    """Serialize `value` as strict JSON: NaN and infinity become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=indent, allow_nan=False, default=str)
