"""Means over samples, accumulated on the device and reduced over ranks once per log line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects, rank, world_size


def global_counts(counts: Sequence[Any], device: torch.device) -> tuple[Sequence[Any] | Tensor, Any]:
    """The count of each micro-batch over all ranks, and their sum, which divides every loss: 1 if nothing counts, so
    that the loss is zero and not NaN. A collective."""
    on_device = isinstance(counts[0], Tensor)
    if world_size() == 1:
        # A number divided by an integer tensor is of the default dtype, float32.
        return counts, sum(counts).clamp(min=1).double() if on_device else max(sum(counts), 1)
    # To build it on the device would wait until the device has done all its work.
    here = torch.stack(list(counts)).double() if on_device else torch.tensor(counts, dtype=torch.float64)
    reduced = here.to(device, non_blocking=True)
    dist.all_reduce(reduced)
    return reduced, reduced.sum().clamp(min=1)


def plain_values(records: Mapping[str, Any]) -> dict[str, Any]:
    """`records` with scalar tensors as numbers, for JSON; waits for the device."""
    return {name: v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for name, v in records.items()}


class MetricSums:
    """Running (sum, count) pairs. `add` is asynchronous; `compute` waits for the device, and is a collective."""

    def __init__(self, device: torch.device):
        self.device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor | float] = {}

    def add(self, values: Mapping[str, Tensor], count: float | Tensor) -> None:
        """Add this rank's sums over `count` samples: scalars, or tensors of one shape per name."""
        for name, value in values.items():
            value = value.detach()
            if name in self._sums:
                self._sums[name] = self._sums[name] + value
                self._counts[name] = self._counts[name] + count
            else:
                self._sums[name], self._counts[name] = value, count

    def compute(self) -> dict[str, Any]:
        """The mean of everything added since the last reset, over all ranks; a list for a tensor of several numbers.

        All ranks must have added the same names. A mean over no samples is left out.
        """
        if not self._sums:
            return {}
        columns = [*self._sums.values(), *self._counts.values()]
        totals = torch.cat([torch.as_tensor(v, dtype=torch.float64, device=self.device).reshape(-1) for v in columns])
        if dist.is_initialized():
            dist.all_reduce(totals)
        shapes = [value.shape for value in self._sums.values()]
        *sums, counts = totals.cpu().split([*(shape.numel() for shape in shapes), len(shapes)])
        parts = zip(self._sums, sums, shapes, counts, strict=True)
        return {name: (total.view(shape) / count).tolist() for name, total, shape, count in parts if count}

    def of_evaluation(self, name: str) -> dict[str, Any]:
        """`compute`. Raises UserError, on every rank, if the evaluation `name` had nothing to add. A collective."""
        if not (means := self.compute()):
            raise UserError(
                f"evaluate: {name!r} has no batches, or no label that counts. Give a dataset or a list with "
                "samples, not a generator, which is empty after one pass."
            )
        return means

    def reset(self) -> None:
        self._sums, self._counts = {}, {}

    def state_dict(self) -> list[dict[str, list[Any]]]:
        """[sum, dtype, count] by name of each rank, so that a log line that spans a checkpoint stays the same."""
        mine = {
            name: [value.tolist(), str(value.dtype).removeprefix("torch."), float(self._counts[name])]
            for name, value in self._sums.items()
        }
        return gather_objects(mine)

    def load_state_dict(self, state: list[dict[str, list[Any]]]) -> None:
        """Load this rank's sums. Of a state saved with another world size, rank r of W takes the parts r, r + W, ..."""
        self.reset()
        for part in state[rank() :: world_size()]:
            for name, (value, dtype, count) in part.items():
                self.add({name: torch.tensor(value, dtype=getattr(torch, dtype), device=self.device)}, count)
        for name, (value, dtype, _) in state[0].items():
            zeros = torch.zeros_like(torch.tensor(value, dtype=getattr(torch, dtype), device=self.device))
            self.add({name: zeros}, 0.0)
