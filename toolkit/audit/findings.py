"""Faults of a checkpoint, and the experts and layers that have them in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_NAMED = 8


@dataclass(frozen=True)
class Finding:
    """A fault, with the tensors that have it."""

    check: str
    message: str
    tensors: list[str]


def runs(numbers: Iterable[int]) -> str:
    """Return "1, 2, 5-7": at most `MOST_NAMED` runs of sorted numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found[:MOST_NAMED])
    return said + (" and more" if len(found) > MOST_NAMED else "")


def named(experts: Sequence[int], count: int | None = None) -> str:
    """Return "expert(s) 1, 2, 5-7", with "and more" if there are more than these."""
    said = runs(experts)
    return f"expert(s) {said}{' and more' if (count or 0) > len(experts) and not said.endswith('more') else ''}"
