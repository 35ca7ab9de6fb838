"""Which samples a model was given, whatever batch they came in."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.commands.doctor.record import digest

PADDING = (0, -1, -100)
"""What inputs and labels are padded with."""


def sample_digests(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """A digest of each sample that a model is called with, without what pads it to the length of the others.

    Padding is beyond what an argument called `...length` (B,) says, or where one called `...mask` (B, T) is 0; without
    these, it is the zeros and ignored labels at the end.
    """
    names = [*inspect.signature(model.forward).parameters][: len(args)]
    given = dict(zip(names + [f"argument{i}" for i in range(len(names), len(args))], args, strict=True)) | dict(kwargs)
    if len(args) == 1 and isinstance(args[0], Mapping):
        given = {**args[0], **kwargs}
    inputs = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.ndim}
    rows = next(iter(inputs.values())).shape[0] if inputs else 0
    aligned = {name: value for name, value in inputs.items() if value.shape[0] == rows}
    mask = next((value for name, value in aligned.items() if "mask" in name and value.ndim == 2), None)
    if mask is None:
        mask = _mask_of_lengths(aligned)
    digests = []
    for row in range(rows):
        parts = [value[row] for value in aligned.values()]
        if mask is not None:
            kept = mask[row].bool()
            parts = [part[kept] if part.ndim and len(part) == len(kept) else part for part in parts]
        digests.append(digest(*(_unpadded(part) for part in parts)))
    return digests


def _mask_of_lengths(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """(B, T) for the longest input, or None where none says how long samples are."""
    lengths = next((value for name, value in inputs.items() if "length" in name and value.ndim == 1), None)
    longest = max((value.shape[1] for value in inputs.values() if value.ndim > 1), default=0)
    return None if lengths is None else torch.arange(longest, device=lengths.device) < lengths[:, None]


def _unpadded(part: Tensor) -> Tensor:
    """`part` (T, ...) up to its last step that is not all padding of one kind."""
    if not part.ndim:
        return part
    steps = part.reshape(len(part), -1)
    used = torch.stack([(steps != value).any(1) for value in PADDING]).all(0).nonzero()
    return part[: int(used[-1]) + 1] if len(used) else part[:0]
