"""Callbacks: what happens between the lines of the training loop.

There are eight hooks. This is where they fire:

    fit:
        on_fit_start
        while steps are left:
            on_step_start(micro_batches)        (may call trainer.save, for the step before)
                forward and backward of each micro-batch, gradients averaged and clipped
            on_before_optimizer_step
                optimizer step
            on_step_end                         (may call trainer.evaluate)
                evaluate -> on_evaluate_end(name, metrics)
            a line of metrics is written, and with that the step is complete
                save     -> on_save(folder)
        on_fit_end                              or on_exception(error), when something was raised

Callbacks run in the order of the trainer's list. One that keeps state between steps has `state_dict` and
`load_state_dict`, and its state travels in checkpoints under its class name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.task import Batch
    from toolkit.trainer import Trainer

HOOKS = (
    "on_fit_start",
    "on_step_start",
    "on_before_optimizer_step",
    "on_step_end",
    "on_evaluate_end",
    "on_save",
    "on_exception",
    "on_fit_end",
)


class Callback:
    """Override any of the eight hooks. All ranks run all callbacks; ask `trainer.run.is_main` before writing."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """The model is prepared and any checkpoint is loaded."""

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        """This rank's micro-batches of the coming step are known."""

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """Gradients are final: averaged over ranks and clipped."""

    def on_step_end(self, trainer: Trainer) -> None:
        """`trainer.state` counts the step that just ended; gradients are gone."""

    def on_evaluate_end(self, trainer: Trainer, name: str, metrics: dict[str, float]) -> None:
        """An evaluation named `name` gave `metrics`, equal on all ranks."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """A verified checkpoint lies in `folder`."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Training ends with `error`, perhaps on this rank alone: no collectives here."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Training ended as planned, or was asked to stop."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as plain JSON values. Called on all ranks, saved from the main process."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
