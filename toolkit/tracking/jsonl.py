"""metrics.jsonl: one JSON object per logged step; pictures and tables are made from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends lines, each flushed, so that a kill costs at most the line that was being written.

    Steps ascend. A run that resumes from an earlier step removes the lines after it first.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("ab")
        self._cut_before_append = path.stat().st_size > 0

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line. The first one after a restart removes what an earlier process wrote from this step on."""
        if self._cut_before_append:
            self.truncate(step - 1)
        self._file.write(to_json({"step": step, **values}).encode() + b"\n")
        self._file.flush()

    def truncate(self, step: int) -> None:
        """Remove the lines after `step`, and a last line that a kill left incomplete."""
        self._cut_before_append = False
        end = 0
        with self.path.open("rb") as lines:
            for line in lines:
                record = _parse(line)
                if record is None or record["step"] > step:
                    break
                end += len(line)
        os.truncate(self.path, end)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics file, in order; none where there is no file."""
    if path.exists():
        with path.open("rb") as lines:
            yield from (record for line in lines if (record := _parse(line)) is not None)


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line as a record; None where a kill left it unfinished."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON: NaN and infinity become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=indent, allow_nan=False, default=str)
