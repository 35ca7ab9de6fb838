"""Fingerprint of a data set, to check that a run resumes on the data it started with."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from toolkit.data.table import TensorTable

ROWS_PER_READ = 256
MOST_BYTES = 2**24
"""Maximum bytes to read. Of larger tables, evenly spaced rows are read."""
TOLERANCE = 1e-3

Identity = Mapping[str, Any]
"""Result of `identity_of`, as JSON values."""


def identity_of(table: TensorTable) -> dict[str, Any]:
    """Compute the fingerprint of `table`.

    The last bits of floating-point columns and images (integer columns with three or more dimensions) depend on the
    decoder, so these columns are compared by their moments. Pixels are compared bitwise only if the decoder is equal.

    Args:
        table: Data set.

    Returns:
        `rows`, the number of rows; `sha256`, a digest of column names, types, shapes and integers; `moments` per
        column: mean, root mean square, and mean of the product with a line from -1 at the first row to 1 at the last;
        `pixels`, a digest of the images; and `decoder`, the platform and Pillow version.
    """
    digest, pixels = hashlib.sha256(), hashlib.sha256()
    sums: dict[str, torch.Tensor] = {}
    rows_read = bytes_read = 0
    strides = math.ceil(len(table) / ROWS_PER_READ)
    for first in range(strides):
        rows = torch.arange(first, len(table), strides)
        line = torch.linspace(-1, 1, len(table), dtype=torch.float64)[rows] if len(table) > 1 else torch.ones(1)
        for name, column in sorted(table[rows].items()):
            digest.update(f"{name} {column.dtype} {tuple(column.shape)}\n".encode())
            if not column.is_floating_point():
                exact = digest if column.ndim <= 2 else pixels
                exact.update(column.cpu().contiguous().numpy().tobytes())
            if column.is_floating_point() or column.ndim > 2:
                value = column[:, None].flatten(1).cpu().float().nan_to_num(0, 0, 0)
                mean = value.mean(1).double()
                square = value.square().mean(1).double()
                sums[name] = sums.get(name, 0) + torch.stack([mean, square, mean * line]).sum(1)
            bytes_read += column.nbytes
        rows_read += len(rows)
        if bytes_read >= MOST_BYTES:
            break
    means = {name: (total / rows_read).nan_to_num().tolist() for name, total in sums.items()}
    moments = {
        name: [round(x, 9) for x in (mean, math.sqrt(square), tilt)] for name, (mean, square, tilt) in means.items()
    }
    return {
        "rows": len(table),
        "sha256": digest.hexdigest(),
        "moments": moments,
        "pixels": pixels.hexdigest(),
        "decoder": f"{platform.machine()}, Pillow {version('pillow')}",
    }


def identity_of_length(rows: int) -> dict[str, Any]:
    """Build the fingerprint of a data set whose rows are not read."""
    return {"rows": rows, "sha256": "", "moments": {}}


def same_data(one: Identity, other: Identity) -> bool:
    """Return whether two data sets are equal, up to differences in rounding between processors."""
    if (one["rows"], one["sha256"]) != (other["rows"], other["sha256"]):
        return False
    # Earlier versions did not save `pixels`.
    if one.get("decoder") == other.get("decoder") and one.get("pixels") != other.get("pixels"):
        return False
    for name, moments in one["moments"].items():
        theirs = other["moments"][name]  # names are part of the digest
        if any(abs(a - b) > TOLERANCE * max(moments[1], theirs[1]) for a, b in zip(moments, theirs, strict=True)):
            return False
    return True


def describe(of: Identity) -> str:
    """Format a fingerprint for a message."""
    digest = hashlib.sha256((of["sha256"] + of.get("pixels", "")).encode()).hexdigest()
    return f"{of['rows']:,} rows" + (f" (digest {digest[:12]})" if of["sha256"] else "")
