"""A checkpoint of any format: its tensors without values, and their values in parts of bounded size."""

from __future__ import annotations

import math
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from toolkit.errors import reading
from toolkit.experts.state import manifest
from toolkit.run.tracking.jsonl import from_json

PART = 2**26
"""Bytes of a tensor that are read at a time, if its rows are smaller."""
REMEDY = "Download or copy it again, or save the model again."


class Listed(NamedTuple):
    """A tensor of a checkpoint, without its values."""

    shape: tuple[int, ...]
    dtype: str
    file: str


@dataclass
class Checkpoint(ABC):
    """A checkpoint folder.

    Args:
        folder: The folder.
        config: Its `config.json`, empty without one.
    """

    kind: ClassVar[str]
    """The format, in words."""

    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, Listed] = field(default_factory=dict)
    """Weights by name. A row of an expert that is saved by itself is named `<parameter>/<expert>`."""
    states: dict[str, dict[str, Listed]] = field(default_factory=dict)
    """Optimizer states by weight and state."""
    ids: dict[str, set[int]] = field(default_factory=dict)
    """The experts of a parameter, if the checkpoint lists them; their ids may have gaps."""
    problems: list[str] = field(default_factory=list)
    """Faults of the files, found when they are listed."""

    @abstractmethod
    def rows(self, name: str, state: str | None, begin: int, end: int) -> Tensor:
        """Return rows `begin` to `end` of a weight, or of its optimizer state."""

    def parts(self, name: str) -> Iterator[Tensor]:
        """Yield a weight in parts of at most `PART` bytes, or of a row."""
        count, *row = self.tensors[name].shape or (1,)
        step = max(1, PART // (8 * max(1, math.prod(row))))  # no number has more than 8 bytes
        for begin in range(0, count, step):
            yield self.rows(name, None, begin, min(begin + step, count))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises UserError if there is none, or the file is too large or not regular."""
    with reading(require_regular(path), REMEDY):
        if (size := path.stat().st_size) > manifest.LARGEST_MANIFEST:
            raise ValueError(f"it has {size:,} bytes")
        value = from_json(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        return value


def require_regular(path: Path) -> Path:
    """Return `path`. Raises UserError unless it is, or links to, a regular file; reading a pipe would wait forever."""
    with reading(path, REMEDY):
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is not a regular file")
    return path
