"""When a run saves, and which checkpoint it continues from. `toolkit.checkpoint.checkpoint` says how."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from toolkit.checkpoint.background import BackgroundSave
from toolkit.checkpoint.checkpoint import load_checkpoint
from toolkit.checkpoint.finding import fetch_checkpoint, find_checkpoint
from toolkit.checkpoint.retention import go_back, to_go_back_to
from toolkit.errors import UserError
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.folder import is_finished
from toolkit.run.tracking.metric_names import require_mode, result_name
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.throughput import Throughput

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer

LONGEST_WAIT_S = 30.0
"""Limit in seconds for a checkpoint in progress when training ends with an error."""


class Checkpointing(Callback):
    """Saves every so many steps and at the end, and continues from the newest checkpoint that verifies.

    With `best`, a checkpoint is also saved after each evaluation better than all before, and kept in addition to the
    newest. Training ends with its weights in the model and its evaluation in the results; `results["best_checkpoint"]`
    has its step. NaN is never better.

    If a save fails because the disk is full, training goes on, but the run does not finish without the last checkpoint:
    it raises UserError.

    A step is saved at the start of the next one. By then all callbacks have handled it and its log line is written, so
    a continued metrics file has each line once. With `in_background` a thread writes the files while training goes on,
    and the next save waits for it. The last save is written at once.
    """

    runs_after = (Throughput, Evaluation)
    """A save must not count as training time, and the results of the last evaluation are replaced by the best ones."""

    def __init__(self, options: CheckpointOptions | None = None):
        options = options or CheckpointOptions()
        self.every_steps, self.keep, self.metric = options.every_steps, options.keep, options.best
        self._sign = -1 if self.metric is not None and require_mode(self.metric, options.best_mode) == "max" else 1
        self._best: dict[str, Any] | None = None
        """`metric`, `step`, and `evaluated`: all metrics of that step."""
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})
        """The step of the last evaluations and their metrics."""
        self._background = BackgroundSave() if options.in_background else None
        self._started_at = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        run, back = trainer.run, trainer.run.config.resume_from
        names = {callback.name for callback in trainer.callbacks if isinstance(callback, Evaluation)}
        if self.metric is not None and self.metric.partition("/")[0] not in names:
            known = ", ".join(f"{name}/loss" for name in sorted(names)) or "none, as there is no evaluation"
            raise UserError(field="checkpoint.best", value=self.metric, remedy=f"name one such as {known}")
        newest = None if run.resume == "no" else find_checkpoint(run.checkpoints, run)
        if back is not None:
            newest = run.on_main_and_share(lambda: to_go_back_to(run.checkpoints, back)) or newest
        if newest is not None:
            settle_buckets(trainer)
            saved = trainer.restore(newest)
            if run.config.extend:
                _describe_extension(trainer)
            # All errors are raised above, so a run that raises is unchanged.
            if back is not None:
                run.on_main_and_share(lambda: go_back(run.checkpoints, back, run.print))
            self._have_best(trainer)
            run.truncate_metrics(trainer.state.step, saved.get("metrics"))
            run.print(f"continuing at step {trainer.state.step:,} ({newest.name} verified)")
        elif run.resume == "yes" or run.config.extend:
            asked, remedy = ("resume='yes'", "Leave it out")
            if run.config.extend:  # starting from scratch would overwrite the results in the folder
                asked, remedy = "extend=True", "Give another run_dir"
            raise UserError(f"{asked}: no checkpoint in {run.checkpoints} verifies. {remedy} to start from step 0.")
        self._started_at = trainer.state.step

    def _have_best(self, trainer: Trainer) -> None:
        """Fetch the best checkpoint to every machine, or forget it if it is gone."""
        run = trainer.run
        if self._best is None or self._best["step"] == trainer.state.step:
            return
        step = self._best["step"]
        if damage := fetch_checkpoint(run.checkpoints / f"step-{step:08d}", run):
            run.print(f"warning: the best checkpoint, of step {step:,}, is gone ({damage}): it is forgotten.")
            self._best = None

    def _end_with_best(self, trainer: Trainer) -> None:
        """Put the weights of the best checkpoint into the model, and its evaluations into the results."""
        trainer.results.pop("best_checkpoint", None)  # from an earlier start of the run, which kept one
        if trainer.is_preempted:
            return
        self._have_best(trainer)
        if self._best is None:
            return
        trainer.results["best_checkpoint"] = self._best
        if self._best["step"] == trainer.state.step:
            return
        run, step = trainer.run, self._best["step"]
        folder = run.checkpoints / f"step-{step:08d}"
        load_checkpoint(folder, model=trainer.raw_model, optimizer=trainer.optimizer, run=run)
        trainer.use_weights_for("eval")
        trainer.results |= {result_name(name): value for name, value in self._best["evaluated"].items()}
        run.print(f"the model has the weights of step {step:,}, the best by {self.metric}")

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        step = trainer.state.step
        every = self.every_steps or trainer.batches.steps_per_epoch
        if step > self._started_at and (step % every == 0 or (self._best and self._best["step"] == step)):
            if self._background is None:
                trainer.save(self.keep)
                return
            self._finish(trainer, self._background)
            self._background.start(trainer.begin_save(self.keep, self._background.buffers))
            trainer.enter("callbacks")

    def on_evaluate_end(self, trainer: Trainer, name: str, metrics: dict[str, float]) -> None:
        step = trainer.state.step
        evaluated = (self._evaluated[1] if self._evaluated[0] == step else {}) | metrics
        self._evaluated = step, evaluated
        if self.metric is None or self.metric.partition("/")[0] != name:
            if self._best and self._best["step"] == step:
                self._best["evaluated"] = evaluated
            return
        before = math.inf if self._best is None else self._sign * self._best["evaluated"][self.metric]
        if self._sign * metrics[self.metric] < before:
            self._best = {"metric": self.metric, "step": step, "evaluated": evaluated}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        best = state["best"]
        self._best = best if best and best["metric"] == self.metric else None

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        if self._background is not None:
            self._background.wait(LONGEST_WAIT_S)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._background is not None:
            self._finish(trainer, self._background)
        saved = trainer.state.step == self._started_at or trainer.save(self.keep) is not None
        if not saved and not trainer.is_preempted:  # else `Preemption` says where the run will continue
            raise UserError(
                f"the last checkpoint, of step {trainer.state.step:,}, could not be written to "
                f"{trainer.run.checkpoints}. Make room, and run the same command again, which continues from the "
                "newest one."
            )
        self._end_with_best(trainer)

    def _finish(self, trainer: Trainer, background: BackgroundSave) -> None:
        """Wait for the checkpoint in progress."""
        trainer.enter("checkpoint")
        folder = background.wait()
        if folder is not None:
            trainer.call_hooks("on_save", folder)


def _describe_extension(trainer: Trainer) -> None:
    """Print how the schedule of the longer run changes the learning rate. Raises UserError if the run is not longer."""
    run, step = trainer.run, trainer.state.step
    if step == trainer.max_steps and not run.on_main_and_share(lambda: is_finished(run.folder)):
        return  # it was stopped between its last step and its results
    if step >= trainer.max_steps:
        raise UserError(f"extend=True: the run has {step:,} steps already. Give it more epochs or max_steps.")
    if not run.is_main:
        return
    rates = [line["train/learning_rate"] for line in run.metrics() if "train/learning_rate" in line]
    before = f"from {rates[-1]:.3g} " if rates else ""
    if trainer.schedule is None:
        run.print(f"extended to step {trainer.max_steps:,}: the scheduler continues from its saved state.")
        return
    now, last = (trainer.base_rates[0] * trainer.schedule(at) for at in (step, trainer.max_steps - 1))
    run.print(
        f"extended to step {trainer.max_steps:,}: the schedule now has this length; the learning rate goes "
        f"{before}to {now:.3g} at this step, and to {last:.3g} at the last."
    )


def settle_buckets(trainer: Trainer) -> None:
    """Run forward and backward passes of an empty batch, after which DDP rebuilds its buckets, as in the first run.

    The buckets decide the order in which the gradients of more than two ranks are added, and so their last bits. Call
    this before a checkpoint is loaded.
    """
    if trainer.run.world_size <= 2:
        return
    trainer.model.train()
    with trainer.run.accelerator.autocast():
        loss = trainer.loss(trainer.batches.empty())
    loss.total.backward()
    trainer.optimizer.zero_grad()
