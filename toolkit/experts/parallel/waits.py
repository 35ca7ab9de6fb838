"""How long a rank spends in collectives, which is mostly waiting for the others: host seconds on a CPU, seconds of the
device's own stream elsewhere, so that no measuring waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")
Mark = float | torch.Event


def mark(device: torch.device) -> Mark:
    """A point in time of the work on `device`."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device.type, enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Both marks are of one device, which has come to the second."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def seconds_per_byte(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the seconds in which this rank sends a byte to the others of `group`, in the fastest of four all-to-alls
    of 4 MiB; 0 for no group. Waits for the device. A collective of `group`."""
    if group is None:
        return 0.0
    ranks = dist.get_world_size(group)
    sent = torch.zeros(ranks, 2**22 // ranks, dtype=torch.uint8, device=device)
    received, marks = torch.empty_like(sent), [mark(device)]
    for _ in range(4):
        dist.all_to_all_single(received, sent, group=group)
        marks.append(mark(device))
    received.cpu()  # the device has come to the last mark
    return min(seconds_between(*each) for each in pairwise(marks)) / (sent.numel() - len(sent[0]))


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective of this rank."""

    kind: str
    begin: Mark
    end: Mark

    @property
    def seconds(self) -> float:
        return seconds_between(self.begin, self.end)


class Waits:
    """Timed collectives of this process since the last `take`, while `on`; no overhead while off."""

    def __init__(self) -> None:
        self.on = False
        self._waits: list[Wait] = []

    def timed(
        self, kind: str, device: torch.device, collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call and time `collective`; return its result."""
        if torch.compiler.is_compiling() or not self.on:
            return collective(*args, **kwargs)
        begin = mark(device)
        result = collective(*args, **kwargs)
        self.add(kind, begin, mark(device))
        return result

    def add(self, kind: str, begin: Mark, end: Mark) -> None:
        """Add an external measurement."""
        if self.on:
            self._waits.append(Wait(kind, begin, end))

    def take(self) -> list[Wait]:
        """In order; their seconds can be read once the device has done its work."""
        taken, self._waits = self._waits, []
        return taken


waits = Waits()
"""Timed collectives of this rank. Kinds: counts, experts, losses, gradients."""
