"""Files of `torch.save`, read without executing code."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch


def load_plain(path: Path) -> Any:
    """Return tensors, numbers and containers in a file of `torch.save`; tensors are mapped and not loaded.

    Raises ValueError, or the errors of zipfile and torch, for anything else.
    """
    with zipfile.ZipFile(path) as parts:
        if any(part.compress_type for part in parts.infolist()):
            raise ValueError("it is compressed")  # to any size
    with warnings.catch_warnings(action="ignore"):  # of the protocol
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
