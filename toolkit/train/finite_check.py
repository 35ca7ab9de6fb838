"""Stops training at a loss, a gradient or a weight that is not finite, without a host sync on ordinary steps; or skips
steps whose gradients are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import together
from toolkit.experts.state.tensor_files import first_not_finite, named_states

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

GRADIENT = "the gradient of"
MOST_SKIPPED = 3
"""Skipped steps in a row after which training stops."""
SHOWN_SAMPLES = 8
REMEDY = "Lower the learning rate, clip gradients, or look at this step's data"
REMEDY_FOR_DATA = "Correct or drop it"


@dataclass(frozen=True)
class _Step:
    """The numbers of one optimizer step, on the device."""

    step: int
    norm: Tensor
    """Global gradient norm, equal on all ranks."""
    losses: list[Tensor]
    """Losses of this rank's micro-batches."""
    parameters: Sequence[Tensor]
    norms: Tensor
    """Gradient norm of each of `parameters`, on this rank."""


class FiniteCheck:
    """Check of losses, gradients and weights for non-finite values.

    On a CPU each step is read before its update, so that weights stay finite. Elsewhere steps are read at log steps and
    before a checkpoint is written, when the host waits anyway. Nothing that is not finite gets into a checkpoint, so
    the last one before it is kept.

    fp16's loss scaling skips steps whose gradients are not finite, so with it (`scaled`) only losses on log lines and
    weights are checked. All methods that raise are collectives, and raise the same UserError on every rank.

    With `on_nonfinite="skip"`, each step is read before its update on every device, and steps whose gradients are not
    finite are left out; training stops after `MOST_SKIPPED` in a row. Of steps that were read before their update, the
    forward passes are repeated to find the first module whose output is not finite.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self.model = trainer.raw_model
        self.scaled = trainer.run.accelerator.scaler is not None
        self.skip = trainer.run.config.on_nonfinite == "skip"
        self.reads_at_once = self.skip or trainer.run.device.type == "cpu"
        self.skipped = 0
        """Steps skipped by this process."""
        self._in_a_row = 0
        self._waiting: list[_Step] = []
        self._norms: tuple[Sequence[Tensor], Tensor] = ([], torch.zeros(0))

    def take_norms(self, parameters: Sequence[Tensor], norms: Tensor) -> None:
        """Remember the norm of the gradient of each of `parameters`, for the `add` that follows."""
        self._norms = parameters, norms

    def add(self, step: int, norm: Tensor, losses: list[Tensor]) -> bool:
        """Check the `step`-th optimizer step, before its update, now or later; returns whether to take the update."""
        if self.scaled:
            return True
        self._waiting.append(_Step(step, norm, losses, *self._norms))
        if self.skip and not norm.isfinite():
            self._in_a_row += 1
            if self._in_a_row < MOST_SKIPPED:
                self._waiting.clear()
                self.skipped += 1
                if self.skipped == 1:
                    why, _ = self._explain(step)
                    self._trainer.run.print(f"warning: step {step:,} is skipped: its gradients are not finite{why}.")
                return False
        else:
            self._in_a_row = 0
        if self.reads_at_once:
            self.read()
        return True

    def read(self) -> None:
        """Raise UserError for the first step since the last reading whose gradients were not finite."""
        steps, self._waiting = self._waiting, []
        if not steps:
            return
        finite = torch.stack([step.norm for step in steps]).isfinite().tolist()
        bad = next((step for step, is_finite in zip(steps, finite, strict=True) if not is_finite), None)
        if bad is not None:
            found = self._found(self._name(bad)) or "the norm of all gradients is not finite"
            again = f" for the {MOST_SKIPPED}rd time in a row" if self._in_a_row == MOST_SKIPPED else ""
            why, remedy = self._explain(bad.step) if self.reads_at_once else ("", REMEDY)
            _stop(f"step {bad.step:,}: {found}{again}{why}", remedy)

    def check_line(self, step: int, means: Mapping[str, Any]) -> None:
        """Raise UserError if the mean training loss of a log step is not finite."""
        self.read()
        for name in ("train/loss", "train/penalty"):
            if not math.isfinite(means.get(name, 0.0)):
                _stop(f"step {step:,}: {name} is {means[name]}")

    def check_weights(self, step: int) -> None:
        """Raise UserError for weights and optimizer states that are not finite after `step` steps, and for buffers that
        hold NaN. A second moment of infinity changes no weight any more, and so no loss and no gradient tells of it."""
        self.read()
        buffers = first_not_finite(self.model.named_buffers(), lambda buffer: ~buffer.isnan())  # a mask may hold -inf
        states = named_states(self.model, self._trainer.optimizer)
        name = self._first_weight() or buffers or first_not_finite(states)
        if found := self._found(name):
            _stop(f"after step {step:,}: {found}")

    def _name(self, step: _Step) -> str | None:
        """The first tensor of `step` that is not finite on this rank: weights, then losses, then gradients."""
        # Of steps that are read late, the updates have spread to the weights by now.
        if self.reads_at_once and (weight := self._first_weight()):
            return weight
        if any(not loss.isfinite() for loss in step.losses):
            return "the loss"
        finite = step.norms.isfinite().tolist()
        bad = {id(p) for p, is_finite in zip(step.parameters, finite, strict=True) if not is_finite}
        return next((f"{GRADIENT} {name}" for name, p in self.model.named_parameters() if id(p) in bad), None)

    def _first_weight(self) -> str | None:
        return first_not_finite((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def _explain(self, step: int) -> tuple[str, str]:
        """Return the first module with a non-finite output in the step that was just computed and the batch's rows, as
        half a sentence, and the remedy. A collective."""
        trainer = self._trainer

        def forward() -> None:
            for index, batch in enumerate(trainer.micro_batches):
                trainer.seed_micro_batch(index)
                with trainer.autocast():
                    trainer.task.loss(trainer.model, batch)

        module = first_module(self.model, forward)
        words = [f"the output of {module} is the first" if module else "the outputs of all modules are finite"]
        samples = trainer.batches.rows_of(step - 1)
        if bad := self._found_in_data(samples):
            words.insert(0, bad)
        if samples:
            more = ", ..." if len(samples) > SHOWN_SAMPLES else ""
            words.append(f"the batch's rows are {', '.join(map(str, samples[:SHOWN_SAMPLES]))}{more}")
        return " (" + "; ".join(words) + ")", REMEDY_FOR_DATA if bad else REMEDY

    def _found_in_data(self, samples: list[int]) -> str | None:
        """Find the first non-finite column of the batch, and its first row if `samples` are given. A collective."""
        batches = [self._trainer.batches.table[torch.tensor(samples)]] if samples else self._trainer.micro_batches
        mine = None
        for batch in batches:
            for name, column in batch.items():
                if isinstance(column, torch.Tensor) and column.is_floating_point() and not column.isfinite().all():
                    row = int((~column[:, None].flatten(1).isfinite().all(1)).nonzero()[0])
                    which = f"row {samples[row]} of the training data" if samples else "the batch"
                    mine = mine or f"{which} is not finite in the column `{name}`"
        return next(filter(None, together(lambda: mine)), None)

    @staticmethod
    def _found(mine: str | None) -> str | None:
        """Return the first finding of all ranks, losses before gradients, or None. A collective."""
        found = [(name.startswith(GRADIENT), rank, name) for rank, name in enumerate(together(lambda: mine)) if name]
        if not found:
            return None
        _, rank, name = min(found)
        return f"{name} is not finite" + (f" on rank {rank}" if rank else "")


def first_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """The first module of `model` whose output is not finite when `forward` runs it, on any rank. A collective."""
    names: list[str] = []

    def look(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if any(value.is_floating_point() and not value.isfinite().all() for value in _tensors(output)):
            names.append(name)

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(partial(look, name)).remove)
        forward()
    return next((found[0] for found in together(lambda: names) if found), None)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _stop(what: str, remedy: str = REMEDY) -> NoReturn:
    raise UserError(f"{what}. {remedy}; earlier checkpoints are kept.")
