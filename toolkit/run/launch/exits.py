"""Exit of a process: one line for all ranks, and an exit code."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from typing import NoReturn

from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, EXIT_SMALLER_BATCHES, StepOutOfMemory, UserError
from toolkit.experts.parallel.nodes import launched_world
from toolkit.run.launch.restarts import LAUNCH, past_restarts, restarted, tell
from toolkit.run.launch.signals import STOP_SIGNALS, ignore_stop_signals

GRACE_S = 5.0
"""Seconds that a rank of another launcher waits for the launcher to end it."""
STOPPED = "stopped by Ctrl-C."
LOST = "error: another process has ended, and this one cannot go on without it."
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> None:
    """Let the kernel kill this rank when its launcher ends (on Linux).

    A killed torch agent leaves ranks behind, which would keep the run folder locked.

    Raises:
        UserError: If another process started this one, for example a rank, whose environment it inherits.
    """
    if LAUNCH in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.environ.get("TORCHELASTIC_RUN_ID") != str(os.getppid()):
            del os.environ[LAUNCH]  # `tell` would write into the rank's file
            raise UserError(
                f"{LAUNCH}: is set, but the launcher did not start this process. "
                "Unset it, or start the process with env=tk.without_launcher(os.environ)."
            )


def report(message: str, label: str = "error: ") -> None:
    """Write one line to stderr, or a message without a label as it is, however many ranks call this."""
    line = label + " ".join(message.split()) if label else message.rstrip()
    ignore_stop_signals()
    if tell(line):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Other launchers end all ranks as soon as one exits: let rank 0 write. If this rank is still running after the
        # grace period, only this rank has an error to report.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        time.sleep(GRACE_S)
    _write(line)


def report_bug(error: Exception) -> None:
    """Write the traceback, once for all ranks of `--num-processes`."""
    ignore_stop_signals()
    if not tell("".join(traceback.format_exception(error))):
        sys.excepthook(type(error), error, error.__traceback__)


def end_from_a_thread(line: str) -> NoReturn:
    """Write `line` and end this process, whose main thread hangs."""
    if not tell(line):
        _write(line)
    os._exit(EXIT_BUG)


def lost_process(error: Exception) -> str | None:
    """Return a message if `error` of gloo or NCCL means that another process hangs or has ended; else None."""
    if not isinstance(error, RuntimeError):
        return None
    if re.search(r"timed out waiting|collective operation timeout", str(error), re.IGNORECASE):
        return "another process did not answer within --process-timeout: it hangs or is gone."
    gone = r"connection (closed|reset) by peer|connection was likely closed|broken pipe|remote process exited"
    if re.search(gone, str(error), re.IGNORECASE):
        return LOST.removeprefix("error: ")
    return None


def start_again(error: StepOutOfMemory) -> NoReturn:
    """Restart this run with the smaller micro-batches recorded in its folder.

    Ranks of `--num-processes` are restarted by their launcher. A single process is replaced by a new one, which frees
    all memory. A rank of another launcher exits with `EXIT_PREEMPTED`: the launcher or the same command restarts it.
    """
    if tell(str(error)):
        leave(EXIT_SMALLER_BATCHES)
    if launched_world() is not None:
        end(EXIT_PREEMPTED, f"{error} Run the same command again.", label="")
    for worker in multiprocessing.active_children():  # data loader workers would outlive this process
        worker.kill()
    _write(f"restart: {error}")
    environment = os.environ | restarted(error.folder, [*past_restarts(), str(error)])
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def end(code: int, message: str, label: str = "error: ") -> NoReturn:
    """Report `message` and leave with `code`."""
    report(message, label)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit with `code`; after an error, without waiting for ranks that can be gone."""
    ignore_stop_signals()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if code != EXIT_DONE:
            os._exit(code)
        distributed.destroy_process_group()
    sys.exit(code)


def _write(line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed
        sys.stdout.flush()
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
