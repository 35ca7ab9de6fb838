"""Routing traces: assignments per source rank and expert in each training forward of a run.

A trace is one `.npz` file: a ZIP of arrays, `load_<n>` int32 (F, L, S, E) and `step_<n>` int64 (F) in chunks, and
`metadata` as JSON text. No pickle. Letters as in `toolkit.experts.routing.metrics`.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import reading
from toolkit.experts.layer.routing_log import RowBytes
from toolkit.experts.placement.placement import ExpertPlacement

FORMAT = 1
MOST_EXPANSION = 100
"""Unpacked over packed size of a trace of more than 64 MB: compressed counts are never this small."""


@dataclass(frozen=True)
class Trace:
    """The contents of a trace file."""

    load_FLSE: NDArray[np.int32]
    step_F: NDArray[np.int64]
    """The optimizer step of each forward, from 0."""
    placements: list[tuple[int, tuple[ExpertPlacement, ...]]]
    """(first forward, placements from then on, one per layer)"""
    metadata: dict[str, Any]

    @property
    def layers(self) -> list[str]:
        return list(self.metadata["layers"])

    @property
    def row_bytes(self) -> list[RowBytes]:
        """Per layer."""
        return [RowBytes(*pair) for pair in self.metadata["row_bytes"]]

    @property
    def digest(self) -> str:
        """SHA-256 of the loads."""
        shape = json.dumps(self.load_FLSE.shape).encode()
        return hashlib.sha256(shape + np.ascontiguousarray(self.load_FLSE, dtype="<i4").tobytes()).hexdigest()

    def load_TLSE(self) -> NDArray[np.int64]:
        """Return the loads per optimizer step."""
        steps = np.unique(self.step_F, return_inverse=True)[1]
        load = np.zeros((int(steps.max()) + 1, *self.load_FLSE.shape[1:]), dtype=np.int64)
        np.add.at(load, steps, self.load_FLSE)
        return load


class TraceFile:
    """Writes a trace in chunks, to `<path>.part` until it is closed."""

    def __init__(self, path: Path):
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._chunks = 0
        self._forwards = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._part.unlink(missing_ok=True)  # a link would be followed
        self._zip = zipfile.ZipFile(self._part, "w", zipfile.ZIP_DEFLATED)
        self._placements: list[dict[str, Any]] = []

    def add(self, load_FLSE: NDArray[Any], step_F: Sequence[int], placements: Sequence[ExpertPlacement]) -> None:
        """Append forwards under the same placements, one per layer."""
        now = [placement.to_dict() for placement in placements]
        if not self._placements or self._placements[-1]["layers"] != now:
            self._placements.append({"forward": self._forwards, "layers": now})
        self._write(f"load_{self._chunks:05d}", np.asarray(load_FLSE, dtype=np.int32))
        self._write(f"step_{self._chunks:05d}", np.asarray(step_F, dtype=np.int64))
        self._chunks, self._forwards = self._chunks + 1, self._forwards + len(step_F)

    def close(self, metadata: dict[str, Any]) -> None:
        """Write the metadata and renames the file to its final name."""
        facts = {"format": FORMAT, **metadata, "placements": self._placements}
        self._write("metadata", np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8))
        self._zip.close()
        self._part.replace(self.path)

    def _write(self, name: str, array: NDArray[Any]) -> None:
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, array, allow_pickle=False)


def read_trace(path: str | Path) -> Trace:
    """Read a routing trace.

    Args:
        path: A file that a `TraceRecorder` wrote.

    Raises:
        UserError: If the file is missing, damaged, of another format, or much larger unpacked than packed.

    Example:
        ```python
        trace = experts.read_trace("runs/traced/traces.npz")
        pairs_TLSE = trace.load_TLSE()  # (token, expert) pairs per step, layer, source rank and expert
        ```
    """
    path = Path(path)
    with reading(path, "Give the file of a TraceRecorder."):
        if not path.is_file():  # a pipe would wait for ever
            raise FileNotFoundError("not a file")
        with arrays_of(path) as file:
            metadata = json.loads(read_array(file, "metadata").tobytes())
            if metadata["format"] != FORMAT:
                raise ValueError(f"format {metadata['format']}, not {FORMAT}")
            chunks = sorted(name[5:-4] for name in file.namelist() if name.startswith("load_"))
            load_FLSE = np.concatenate([read_array(file, f"load_{chunk}") for chunk in chunks])
            step_F = np.concatenate([read_array(file, f"step_{chunk}") for chunk in chunks])
            if load_FLSE.ndim != 4 or load_FLSE.dtype != np.int32 or step_F.shape != load_FLSE.shape[:1]:
                raise ValueError("no loads of forwards, layers, ranks and experts")
            if not load_FLSE.size or load_FLSE.min() < 0:
                raise ValueError("negative loads or none")
            placements = [
                (change["forward"], tuple(ExpertPlacement.from_dict(layer) for layer in change["layers"]))
                for change in metadata.pop("placements")
            ]
    return Trace(load_FLSE, step_F, placements, metadata)


@contextmanager
def arrays_of(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a `.npz` file. Raises ValueError if it is much larger unpacked than packed."""
    with zipfile.ZipFile(path) as file:
        unpacked = sum(entry.file_size for entry in file.infolist())
        if unpacked > max(2**26, MOST_EXPANSION * path.stat().st_size):
            raise ValueError(f"{unpacked:,} bytes unpacked")
        yield file


def read_array(file: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Return an array without pickle; `np.load` would allocate the size that its header claims."""
    with file.open(f"{name}.npy") as member:
        np.lib.format.read_magic(member)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(member)
        return np.frombuffer(member.read(), dtype).reshape(shape, order="F" if is_fortran else "C")
