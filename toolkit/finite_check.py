"""Stops training at a loss, a gradient or a weight that is not finite, without a host sync on ordinary steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.collectives import together
from toolkit.errors import UserError

READ_EVERY = 8
"""Steps between two readings on a device other than a CPU, where reading makes the host wait."""
GRADIENT = "the gradient of"
REMEDY = "lower the learning rate, clip gradients, or look at this step's data"


@dataclass(frozen=True)
class _Step:
    """The numbers of one optimizer step, on the device."""

    step: int
    norm: Tensor
    """Of all gradients, equal on all ranks."""
    losses: list[Tensor]
    """Of this rank's micro-batches."""
    parameters: Sequence[Tensor]
    norms: Tensor
    """Of the gradient of each of `parameters`, on this rank."""


class FiniteCheck:
    """What the optimizer steps since the last reading computed.

    On a CPU each step is read before its update, so that weights stay finite. Elsewhere steps are read together: each
    `READ_EVERY` of them, at log steps and before a checkpoint is written. Nothing that is not finite gets into a
    checkpoint, so the last one before it is kept.

    fp16's loss scaling skips steps whose gradients are not finite, so with it (`scaled`) only losses on log lines and
    weights are checked. All methods that raise are collectives, and raise the same UserError on every rank.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, scaled: bool):
        self.model, self.scaled = model, scaled
        self.read_every = 1 if device.type == "cpu" else READ_EVERY
        self._waiting: list[_Step] = []
        self._norms: tuple[Sequence[Tensor], Tensor] = ([], torch.zeros(0))

    def take_norms(self, parameters: Sequence[Tensor], norms: Tensor) -> None:
        """Remember the norm of the gradient of each of `parameters`, for the `add` that follows."""
        self._norms = parameters, norms

    def add(self, step: int, norm: Tensor, losses: list[Tensor]) -> None:
        """Check the `step`-th optimizer step, before its update, now or later."""
        if self.scaled:
            return
        self._waiting.append(_Step(step, norm, losses, *self._norms))
        if len(self._waiting) >= self.read_every:
            self.read()

    def read(self) -> None:
        """Raise UserError for the first step since the last reading whose gradients were not finite."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        norms = torch.stack([step.norm for step in waiting]).tolist()
        bad = next((step for step, norm in zip(waiting, norms, strict=True) if not math.isfinite(norm)), None)
        if bad is not None:
            self._refuse(f"step {bad.step:,}", self._name(bad))
            _stop(f"step {bad.step:,}: the norm of all gradients is not finite")

    def check_line(self, step: int, means: Mapping[str, Any]) -> None:
        """Raise UserError for a mean training loss on a line of metrics that is not finite."""
        self.read()
        for name in ("train/loss", "train/penalty"):
            if not math.isfinite(means.get(name, 0.0)):
                _stop(f"step {step:,}: {name} is {means[name]}")

    def check_weights(self, step: int) -> None:
        """Raise UserError for weights that are not finite after `step` steps, and for buffers that hold NaN."""
        self.read()
        buffers = self.model.named_buffers()
        name = self._first_weight() or _first(buffers, lambda buffer: ~buffer.isnan())  # a mask may hold -inf
        self._refuse(f"after step {step:,}", name)

    def _name(self, step: _Step) -> str | None:
        """The first tensor of `step` that is not finite on this rank: weights, then losses, then gradients."""
        # Of steps that are read late, the updates have spread to the weights by now.
        if self.read_every == 1 and (weight := self._first_weight()):
            return weight
        if any(not loss.isfinite() for loss in step.losses):
            return "the loss"
        finite = step.norms.isfinite().tolist()
        bad = {id(p) for p, is_finite in zip(step.parameters, finite, strict=True) if not is_finite}
        return next((f"{GRADIENT} {name}" for name, p in self.model.named_parameters() if id(p) in bad), None)

    def _first_weight(self) -> str | None:
        return _first(((name, p) for name, p in self.model.named_parameters() if p.requires_grad), torch.isfinite)

    @staticmethod
    def _refuse(when: str, mine: str | None) -> None:
        """Raise UserError with what the ranks found, a loss before gradients, if any found something. A collective."""
        found = [(name.startswith(GRADIENT), rank, name) for rank, name in enumerate(together(lambda: mine)) if name]
        if found:
            _, rank, name = min(found)
            _stop(f"{when}: {name} is not finite" + (f" on rank {rank}" if rank else ""))


def _first(tensors: Iterable[tuple[str, Tensor]], is_right: Callable[[Tensor], Tensor]) -> str | None:
    """The name of the first tensor of which not every element `is_right`."""
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and not is_right(local.detach()).all():
            return name
    return None


def _stop(what: str) -> NoReturn:
    raise UserError(f"{what}: {REMEDY}; checkpoints from before it are kept.")
