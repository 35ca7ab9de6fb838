"""Summaries of tensors' values, which are read once, in parts: a digest, a norm, zeros, constants and a sketch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.audit.checkpoint import Checkpoint
from toolkit.audit.experts import Place, is_matrix, value_of
from toolkit.progress_bar import progress

SKETCH = 16
PIECE = 2**22
"""Elements that are converted at a time."""
SAMPLES = 64
"""Elements that are compared before all are."""
SHARD, PADDED = 0.25, 0.5
"""Least shares of zeros that no padding has, in an expert and in other tensors."""
SAMPLED = 4096
"""Elements of which the share at the limit is taken."""


@dataclass(frozen=True)
class Summary:
    """Summary of the values of an expert's matrix, or of another tensor."""

    digest: bytes
    is_constant: bool
    """Whether all elements are equal, as in the zero points of a symmetric quantization."""
    zero_rows: float
    """Share of the rows that are zero."""
    zero_columns: float
    """Share of the columns that are zero, if the tensor was read at once."""
    norm: float | None
    """Root mean square, None of types with less than 16 bits and of integers."""
    at_limit: float
    """Share of the elements that have the largest magnitude."""
    broken: str | None
    """NaN or infinity, if there are any."""
    sketch: NDArray[Any] | None = None

    @property
    def is_zero(self) -> bool:
        """Whether all values are zero."""
        return self.zero_rows == 1

    @property
    def is_partly_zero(self) -> bool:
        """Whether the values can be some ranks' shards of the rows or columns, and zeros."""
        if self.norm is None:  # integers of a quantized matrix
            return PADDED <= self.zero_rows < 1
        return SHARD <= max(self.zero_rows, self.zero_columns) < 1


Summaries = Mapping[Place, Summary]


def summarize(checkpoint: Checkpoint, places: Iterable[Place], *, sketches: bool) -> dict[Place, Summary]:
    """Read the values at `places`, in the order of tensors."""
    summaries = {}
    for place in progress(sorted(places), "reading experts"):
        value = value_of(checkpoint, place)
        summaries[place] = summary([value], _sketch(value) if sketches and is_matrix(checkpoint, place) else None)
    return summaries


def summary(parts: Iterable[Tensor], sketch: NDArray[Any] | None = None) -> Summary:
    """Return the summary of a tensor in parts."""
    digest, constants, rows, zero_rows, broken = hashlib.blake2b(digest_size=16), set(), 0, 0, None
    zero_columns, at_limit, squares, count = 0.0, 0.0, 0.0, 0
    for part in (part.contiguous() for part in parts if part.numel()):
        digest.update(part.reshape(-1).view(torch.uint8).numpy().data)
        constants.add(_constant(part))
        rows_RD = part.reshape(-1, part.shape[-1] if part.ndim > 1 else 1)
        rows += len(rows_RD)
        zero_rows += _zero_rows(rows_RD)
        zero_columns = _zero_rows(rows_RD.T) / rows_RD.shape[1]
        count += part.numel()
        if part.is_floating_point():
            squares += _squares(part)
            sample = part.reshape(-1)[:: max(1, part.numel() // SAMPLED)].float().abs()
            at_limit = float((sample == sample.max()).double().mean())
            if not math.isfinite(squares):
                broken = broken or _broken(part)
    is_constant = len(constants) == 1 and None not in constants
    is_wide = count and part.is_floating_point() and part.dtype.itemsize > 1
    norm = math.sqrt(squares / count) if is_wide else None
    share = zero_rows / max(1, rows)
    return Summary(digest.digest(), is_constant, share, zero_columns, norm, at_limit, broken, sketch)


def _constant(value: Tensor) -> bytes | None:
    """Return the bytes of the element that all others equal, None if there are several."""
    elements = value.reshape(-1, 1).view(torch.uint8)
    first = elements[:1]
    if bool((elements[:: max(1, len(elements) // SAMPLES)] != first).any()):
        return None
    return None if any(bool((piece != first).any()) for piece in elements.split(PIECE)) else first.numpy().tobytes()


def _zero_rows(rows_RD: Tensor) -> int:
    """Return the number of rows of zeros, if one of `SAMPLES` rows seems to be one."""
    steps = [max(1, size // SAMPLES) for size in rows_RD.shape]
    if bool(rows_RD[:: steps[0], :: steps[1]].any(1).all()):
        return 0
    pieces = rows_RD.split(max(1, PIECE // rows_RD.shape[1]))
    return sum(len(piece) - int(piece.any(1).sum()) for piece in pieces)


def _squares(value: Tensor) -> float:
    """Return the sum of squares in float64, not finite if an element is not."""
    total = 0.0
    for piece in value.reshape(-1).split(PIECE):
        wide = piece.float() if piece.dtype.itemsize < 2 else piece  # float8, which torch does not sum
        norm = torch.linalg.vector_norm(wide, dtype=torch.promote_types(wide.dtype, torch.float32))
        total += float(norm) ** 2
    return total


def _broken(value: Tensor) -> str | None:
    for piece in value.reshape(-1).split(PIECE):
        if not bool((wide := piece.float() if piece.dtype.itemsize < 2 else piece).isfinite().all()):
            return "NaN" if bool(wide.isnan().any()) else "infinity"
    return None


def _sketch(value: Tensor) -> NDArray[Any]:
    """Return (SKETCH, SKETCH) numbers of a matrix, half of its rows and columns from each half, at equal places.

    Their norm is 1, because a quantized matrix has another scale.
    """
    value = value.reshape(-1, value.shape[-1])
    index = []
    for size in value.shape:
        half = np.linspace(0, max(size // 2 - 1, 0), SKETCH // 2).astype(int)
        index.append(torch.from_numpy(np.concatenate([half, half + size // 2]).clip(max=size - 1)))
    numbers = np.asarray(value[index[0]][:, index[1]].double().numpy())
    norm = float(np.linalg.norm(numbers))
    return numbers / norm if 0 < norm < np.inf else numbers
