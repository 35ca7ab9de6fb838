"""When to save, and which checkpoint a run continues from. How is in `toolkit.checkpoint.checkpoint`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from toolkit.checkpoint.background import BackgroundSave
from toolkit.checkpoint.finding import find_checkpoint
from toolkit.checkpoint.retention import go_back, to_go_back_to
from toolkit.errors import UserError
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.launch.children import STOP_SIGNALS
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.throughput import Throughput

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer

STOP_NAMES = {number.name for number in (*STOP_SIGNALS, signal.SIGINT)}
LONGEST_WAIT_S = 30.0
"""For a checkpoint that is being written, where training ends with an error."""


class Checkpointing(Callback):
    """Continues from the newest checkpoint that verifies; saves as often as `options` say, and at the end.

    Training goes on after a save that fails for lack of room, but the run does not finish without the last one: it
    raises UserError.

    A step is saved at the start of the next one: by then all callbacks have handled it and its line of metrics is
    written, so a continued metrics file has each line once. With `in_background` a thread writes it while training goes
    on; the next save waits for it, and the save at the end is written at once.
    """

    runs_after = (Throughput,)
    """The time that a save takes would be counted as training."""

    def __init__(self, options: CheckpointOptions | None = None):
        options = options or CheckpointOptions()
        self.every_steps, self.keep = options.every_steps, options.keep
        self._background = BackgroundSave() if options.in_background else None
        self._started_at = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        run, back = trainer.run, trainer.run.config.resume_from
        newest = None if run.resume == "no" else find_checkpoint(run.checkpoints, run)
        if back is not None:
            newest = run.on_main_and_share(lambda: to_go_back_to(run.checkpoints, back)) or newest
        if newest is not None:
            settle_buckets(trainer)
            saved = trainer.restore(newest)
            if run.config.extend:
                _describe_extension(trainer)
            # All refusals are above: what they refuse stays as it was.
            if back is not None:
                run.on_main_and_share(lambda: go_back(run.checkpoints, back, run.print))
            run.truncate_metrics(trainer.state.step, saved.get("metrics"))
            run.print(f"continuing at step {trainer.state.step:,} ({newest.name} verified)")
        elif run.resume == "yes":
            raise UserError(
                f"resume='yes': no checkpoint in {run.checkpoints} verifies: leave it out to start from step 0."
            )
        self._started_at = trainer.state.step

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        step = trainer.state.step
        every = self.every_steps or trainer.batches.steps_per_epoch
        if step > self._started_at and step % every == 0:
            if self._background is None:
                trainer.save(self.keep)
                return
            self._finish(trainer, self._background)
            self._background.start(trainer.begin_save(self.keep, self._background.buffers))
            trainer.enter("callbacks")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        if self._background is not None:
            self._background.wait(LONGEST_WAIT_S)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._background is not None:
            self._finish(trainer, self._background)
        saved = trainer.state.step == self._started_at or trainer.save(self.keep) is not None
        if not saved and not is_preempted(trainer):  # else `Preemption` says where the run will continue
            raise UserError(
                f"the last checkpoint, of step {trainer.state.step:,}, could not be written to "
                f"{trainer.run.checkpoints}: make room, and run the same command again, which continues from the "
                "newest one."
            )

    def _finish(self, trainer: Trainer, background: BackgroundSave) -> None:
        """Wait for the checkpoint that is being written."""
        trainer.enter("checkpoint")
        folder = background.wait()
        if folder is not None:
            trainer.hooks("on_save", folder)


def is_preempted(trainer: Trainer) -> bool:
    """Whether a signal has ended training before its last step."""
    return trainer.stop_reason in STOP_NAMES and trainer.state.step < trainer.max_steps


def _describe_extension(trainer: Trainer) -> None:
    """Say what the schedule of the longer run does to the learning rate. Raises UserError where it is no longer."""
    run, step = trainer.run, trainer.state.step
    if step >= trainer.max_steps:
        raise UserError(f"extend=True: the run has {step:,} steps already: give it more epochs or max_steps.")
    if not run.is_main:
        return
    rates = [line["train/learning_rate"] for line in run.metrics() if "train/learning_rate" in line]
    before = f"from {rates[-1]:.3g} " if rates else ""
    if trainer.schedule is None:
        run.print(f"extended to step {trainer.max_steps:,}: the scheduler goes on from where it was.")
        return
    now, last = (trainer.base_rates[0] * trainer.schedule(at) for at in (step, trainer.max_steps - 1))
    run.print(
        f"extended to step {trainer.max_steps:,}: the schedule is that of a run of this length; the learning rate goes "
        f"{before}to {now:.3g} at this step, and to {last:.3g} at the last."
    )


def settle_buckets(trainer: Trainer) -> None:
    """Run a backward of an empty batch, after which DDP rebuilds its buckets, as it did in the run that is continued.

    The buckets decide in which order more than two ranks' gradients are added, and so their last bits. To be called
    before a checkpoint is loaded.
    """
    if trainer.run.world_size <= 2:
        return
    trainer.model.train()
    with trainer.run.accelerator.autocast():
        loss = trainer.task.loss(trainer.model, trainer.batches.empty())
    loss.total.backward()
    trainer.optimizer.zero_grad()
