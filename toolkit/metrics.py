"""Means over samples, kept on the device and reduced over ranks once per log line."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class MetricSums:
    """Running (sum, count) pairs. Adding never waits for the device; reading does, and is a collective."""

    def __init__(self, device: torch.device):
        self.device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor | float] = {}

    def add(self, values: Mapping[str, Tensor], count: float | Tensor) -> None:
        """Add this rank's sums over `count` samples."""
        for name, value in values.items():
            value = value.detach()
            if name in self._sums:
                self._sums[name] = self._sums[name] + value
                self._counts[name] = self._counts[name] + count
            else:
                self._sums[name], self._counts[name] = value, count

    def _totals(self) -> list[list[float]]:
        dtype = torch.float64 if self.device.type != "mps" else torch.float32
        rows = [
            torch.stack([torch.as_tensor(v, dtype=dtype, device=self.device) for v in column.values()])
            for column in (self._sums, self._counts)
        ]
        both = torch.stack(rows)
        if dist.is_initialized():
            dist.all_reduce(both)
        return both.tolist()

    def compute(self) -> dict[str, float]:
        """The mean of everything added since the last reset, over all ranks. Every rank added the same names."""
        if not self._sums:
            return {}
        sums, counts = self._totals()
        return {name: s / c if c else float("nan") for name, s, c in zip(self._sums, sums, counts, strict=True)}

    def reset(self) -> None:
        self._sums, self._counts = {}, {}

    def state_dict(self) -> dict[str, list[float]]:
        """The sums over all ranks so far, so that a log line that spans a checkpoint comes out the same."""
        if not self._sums:
            return {}
        sums, counts = self._totals()
        return {name: [s, c] for name, s, c in zip(self._sums, sums, counts, strict=True)}

    def load_state_dict(self, state: Mapping[str, list[float]], *, is_main: bool) -> None:
        """Take up `state` on the main process; the others start at zero."""
        self._sums = {n: torch.tensor(s if is_main else 0.0, device=self.device) for n, (s, _) in state.items()}
        self._counts = {n: c if is_main else 0.0 for n, (_, c) in state.items()}
