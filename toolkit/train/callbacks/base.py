"""Callbacks: what happens between the lines of the training loop.

There are ten hooks. This is where they fire:

    Trainer(...): on_init
    fit:
        on_fit_start
        while steps are left:
            on_step_start(micro_batches)        (may call trainer.save, for the step before)
            on_before_forward
                forward and backward of each micro-batch, gradients averaged and clipped
            on_before_optimizer_step
                optimizer step
            on_step_end                         (may call trainer.evaluate)
                evaluate -> on_evaluate_end(name, metrics)
            metrics are logged, and the step is complete
                save     -> on_save(folder)
        on_fit_end                              or on_exception(error), when something was raised

Callbacks run in the order of the trainer's list, which must respect what each declares in `runs_after`. One that keeps
state between steps has `state_dict` and `load_state_dict`, and its state is saved in checkpoints under its `state_key`.
`Trainer` checks both when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer

HOOKS = (
    "on_init",
    "on_fit_start",
    "on_step_start",
    "on_before_forward",
    "on_before_optimizer_step",
    "on_step_end",
    "on_evaluate_end",
    "on_save",
    "on_exception",
    "on_fit_end",
)
OF_A_STEP = {"data", "step", "callbacks"}
"""Phases of `Trainer.enter` from one step to the next, which share one clock."""


class Callback:
    """Override any of the ten hooks. All ranks run all callbacks; ask `trainer.run.is_main` before writing.

    Example:
        >>> import toolkit as tk
        >>> class StopAfterEvaluation(tk.Callback):
        ...     def on_evaluate_end(self, trainer, name, metrics):
        ...         if metrics["accuracy"] > 0.95:
        ...             trainer.request_stop("accurate enough")
    """

    runs_after: ClassVar[tuple[type[Callback], ...]] = ()
    """Callbacks of these classes, if the list has any, must come earlier in it."""
    state_key: str = ""
    """The key of `state_dict` in checkpoints; "" takes the class name. Set it on an instance to use two of a class."""
    state_attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes that must survive a restart, as plain JSON values equal on all ranks. `state_dict` names them without
    a leading underscore."""

    def on_init(self, trainer: Trainer) -> None:
        """The model is prepared, and no checkpoint is loaded yet. `trainer.experts` has the layers with experts."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """The model is prepared and any checkpoint is loaded."""

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        """This rank's micro-batches of the coming step are known."""

    def on_before_forward(self, trainer: Trainer) -> None:
        """The forwards of a step come next, or of a step that a callback makes by `trainer.learn`."""

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """Gradients are final: averaged over ranks and clipped."""

    def on_step_end(self, trainer: Trainer) -> None:
        """`trainer.state` counts the step that just ended; gradients are gone."""

    def on_evaluate_end(self, trainer: Trainer, name: str, metrics: dict[str, float]) -> None:
        """An evaluation named `name` gave `metrics`, equal on all ranks."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """A verified checkpoint lies in `folder`."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Training ends with `error`, perhaps on this rank only: no collectives here."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Training ended as planned, or was asked to stop."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a restart, as plain JSON values. Called on all ranks, saved from the main
        process."""
        return {name.removeprefix("_"): getattr(self, name) for name in self.state_attributes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict`."""
        for name in self.state_attributes:
            setattr(self, name, state[name.removeprefix("_")])


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise ValueError for an order that `runs_after` forbids, and for two states under one key; UserError for a method
    that looks like a hook and would never be called.

    A wrong order raises instead of being sorted, so that the list that one reads is the order that runs.
    """
    for place, later in enumerate(callbacks):
        for name in dir(later):
            if name.startswith("on_") and name not in HOOKS and callable(getattr(later, name)):
                remedy = did_you_mean(name, HOOKS, f"Take one of {', '.join(HOOKS)}.")
                raise UserError(f"{type(later).__name__}.{name} is not a hook and is never called. {remedy}")
        for earlier in callbacks[:place]:
            if isinstance(later, earlier.runs_after):
                first = type(later).__name__
                second = type(earlier).__name__
                raise ValueError(f"{first} must come before {second} in the list of callbacks")
    keys = [_key(callback) for callback in callbacks if _has_state(callback)]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(
                f"two callbacks would save their state as {key!r} in checkpoints: give each a `state_key` of its own"
            )


def hooks_of(callbacks: Sequence[Callback]) -> dict[str, list[Callable[..., None]]]:
    """Returns by name of a hook the methods of those `callbacks` that override it, in order."""
    return {
        name: [getattr(c, name) for c in callbacks if getattr(type(c), name) is not getattr(Callback, name)]
        for name in HOOKS
    }


def states_of(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the checkpoint state of `callbacks`, by state key. A collective."""
    return {_key(callback): callback.state_dict() for callback in callbacks if _has_state(callback)}


def load_states(callbacks: Sequence[Callback], states: dict[str, Any]) -> None:
    """Load the result of `states_of`. A callback without a state there starts from scratch."""
    for callback in callbacks:
        if state := states.get(_key(callback)):
            callback.load_state_dict(state)


def _key(callback: Callback) -> str:
    return callback.state_key or type(callback).__name__


def _has_state(callback: Callback) -> bool:
    return bool(callback.state_attributes) or type(callback).state_dict is not Callback.state_dict
