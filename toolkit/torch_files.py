"""Files of `torch.save`, read without executing code."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from pickletools import genops, markobject, stackslice
from typing import Any

import torch

MOST_IN_TUPLE = 10_000
"""Values in a tuple and all that it has."""


def load_plain(path: Path) -> Any:
    """Return tensors, numbers and containers in a file of `torch.save`; tensors are mapped and not loaded.

    Raises ValueError, or the errors of zipfile and torch, for anything else.
    """
    with zipfile.ZipFile(path) as parts:
        if any(part.compress_type for part in parts.infolist()):
            raise ValueError("it is compressed")  # to any size
        for name in parts.namelist():
            if name.rpartition("/")[2] == "data.pkl":
                require_small_tuples(parts.read(name))
    with warnings.catch_warnings(action="ignore"):  # of the protocol
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def require_small_tuples(pickled: bytes) -> None:
    """Raise ValueError if a tuple has more than `MOST_IN_TUPLE` values in all.

    Sixty tuples of the same two tuples take some hundred bytes, and a hash of the last one a thousand years.
    """
    sizes: list[int | None] = []  # of the values on the stack; None: a mark
    known: dict[Any, int | None] = {}
    for code, argument, _ in genops(pickled):
        taken: list[int | None] = []
        if stackslice in code.stack_before:
            while sizes and (last := sizes.pop()) is not None:
                taken.append(last)
        if count := len([each for each in code.stack_before if each not in (markobject, stackslice)]):
            taken += sizes[-count:]
            del sizes[-count:]
        size = sum(filter(None, taken)) or 1
        if size > MOST_IN_TUPLE and code.name.startswith("TUPLE"):
            raise ValueError("it has tuples in tuples")
        if code.name == "MARK":
            sizes.append(None)
        elif "GET" in code.name:
            sizes.append(known.get(argument, 1))
        else:
            sizes += [size] * len(code.stack_after)
        if code.name == "MEMOIZE":
            known[len(known)] = size
        elif "PUT" in code.name:
            known[argument] = sizes[-1] if sizes else 1
