"""Child processes that get this process's signals and end with it: the ranks of a run, the runs of a sweep."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Save at the next step and leave with `EXIT_PREEMPTED`. What a scheduler sends before it takes the machine, and what a
terminal sends when it is closed."""
GRACE_S = 5.0
"""How long the other children may go on once one has failed, in seconds."""
POLL_S = 0.05
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def handle_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> dict[signal.Signals, Any]:
    """Install `handler`, but not for signals that this process was started to ignore; returns the former handlers."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    return {number: signal.signal(number, handler) for number in heard}


@contextmanager
def holding_signals(numbers: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Signals that come meanwhile are handled at the end: for calls into libraries that a signal would interrupt.
    Programs that are started meanwhile begin with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Children:
    """Starts child processes within a `with` statement, at whose end all that still run are killed.

    Until then SIGINT and the `STOP_SIGNALS` are passed on to each child, and listed in `received`. Each child leads a
    process group of its own, so that Ctrl-C in a terminal reaches this process only: the first one sends `interrupt` to
    the children, a second one kills them. When this process is killed, the kernel kills the children (on Linux). With
    `raise_received` the first signal is raised once more at the end, where it is handled as if there had been no
    children.
    """

    def __init__(self, *, interrupt: signal.Signals = signal.SIGINT, raise_received: bool = False):
        self.interrupt, self.raise_received = interrupt, raise_received
        self.processes: list[subprocess.Popen[bytes]] = []
        """In the order in which they were started, those that have ended included."""
        self.received: list[int] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._die_with_parent = _die_with_parent()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start `command` without an input; `options` are those of `subprocess.Popen`."""
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=self._die_with_parent, **options
        )
        self.processes.append(child)
        for number in self.received:
            self._send(child, number)
        return child

    def wait(
        self, *, timeout_s: float = float("inf"), grace_s: Callable[[dict[int, int]], float] = lambda _: GRACE_S
    ) -> dict[int, int]:
        """Wait until all have ended, for `timeout_s` at most, and after the first failure for `grace_s` of it at most.

        A failure is an exit code other than 0, negative for a signal. Returns those that were there when the first was
        noticed, by the child's index in `processes`; none if none failed.
        """
        failed: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        while True:
            codes = [child.poll() for child in self.processes]
            if not failed and (failed := {index: code for index, code in enumerate(codes) if code}):
                deadline = min(deadline, time.monotonic() + grace_s(failed))
            if None not in codes or time.monotonic() > deadline:
                return failed
            time.sleep(POLL_S)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        for child in self.processes:
            self._send(child, number)

    def _send(self, child: subprocess.Popen[bytes], number: int) -> None:
        """To the child alone: its own children, such as data loader workers, are for it to stop."""
        if number == signal.SIGINT:
            number = signal.SIGKILL if self.received.count(signal.SIGINT) > 1 else self.interrupt
        child.send_signal(number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = handle_signals(self._forward, (*STOP_SIGNALS, signal.SIGINT))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.processes:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self.raise_received and self.received and error is None:
            signal.raise_signal(self.received[0])


def _die_with_parent() -> Callable[[], object] | None:
    """A function for the child between fork and exec: the kernel kills it when its parent dies (Linux only)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
