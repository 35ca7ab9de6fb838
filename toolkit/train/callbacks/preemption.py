"""Stopping on SIGTERM, on the SIGUSR1 of a scheduler that preempts a job, on the SIGHUP of a closed terminal, or on
Ctrl-C."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.checkpoint.finding import find_checkpoint
from toolkit.checkpoint.retention import step_of
from toolkit.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted, UserError
from toolkit.experts.parallel.groups import new_group
from toolkit.run.launch.restarts import stopped_at_once
from toolkit.run.launch.signals import handle_signals
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing

if TYPE_CHECKING:
    from toolkit.run.run import Run
    from toolkit.train.trainer import Trainer


class Preemption(Callback):
    """On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C to any rank, all ranks end the same step, and raise `Preempted` (exit code
    75, or 130 after Ctrl-C). A second Ctrl-C ends the process at once.

    `Checkpointing` does the saving, so the list of callbacks must have it, before this one.

    The handler stores the signal's number, so a second of the others changes nothing. Ranks share it with an
    asynchronous all-reduce (max) over a gloo group of its own, which is started after each step and read after the next
    one: by then it has finished, and neither the host nor a GPU waits.
    """

    runs_after = (Checkpointing,)

    def __init__(self) -> None:
        self._received = 0
        self._run: Run | None = None
        """While there are steps that are not saved."""
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        if not any(isinstance(callback, Checkpointing) for callback in trainer.callbacks):
            raise ValueError("Preemption needs Checkpointing in the list of callbacks, which saves before it stops")
        self._run, self._received, self._pending = trainer.run, 0, None
        if trainer.run.world_size > 1 and self._group is None:
            self._group = new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            self._handlers = handle_signals(self._store)

    def _store(self, number: int, _frame: FrameType | None) -> None:
        run = self._run
        if number == self._received == signal.SIGINT:
            raise KeyboardInterrupt(stopped_at_once(run.config.run_dir, run.folder) if run else "")
        self._received = number
        if number == signal.SIGINT and run is not None:
            with suppress(RuntimeError):  # it came while a line was being written
                run.print("saving at the end of this step; Ctrl-C again ends at once")

    def on_step_end(self, trainer: Trainer) -> None:
        signalled = self._read()
        if signalled:
            trainer.request_stop(signal.Signals(signalled).name)
        elif self._group is not None:
            self._start_reduction()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._read()  # so that no reduction is left unfinished
        step, run, reason = trainer.state.step, trainer.run, trainer.stop_reason
        if not trainer.is_preempted:
            self._restore_handlers()
            return
        newest = find_checkpoint(run.checkpoints, run)
        if newest is None:
            raise UserError(
                f"stopped by {reason} at step {step:,}, and no checkpoint could be written to {run.checkpoints}."
            )
        # The handlers stay installed: another signal must not interrupt a process that is leaving.
        self._handlers, self._run = {}, None
        saved = "" if step_of(newest) == step else f" from step {step_of(newest):,}, the last that could be saved"
        code = EXIT_INTERRUPTED if reason == signal.SIGINT.name else EXIT_PREEMPTED
        raise Preempted(f"stopped by {reason} at step {step:,}; {run.how_to_continue} to continue{saved}.", code)

    def _start_reduction(self) -> None:
        number = torch.tensor(self._received)
        work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, number

    def _read(self) -> int:
        """The signal that some rank had received when the last reduction started, or 0; the same on all ranks."""
        if self._group is None:
            return self._received
        if self._pending is None:
            return 0
        work, number = self._pending
        self._pending = None
        work.wait()
        return int(number)

    def _restore_handlers(self, *_: Any, **__: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    on_exception = _restore_handlers
