"""Signals that stop a run, and what a process does with them outside training."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from toolkit.errors import Preempted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Save at the next step and exit with `EXIT_PREEMPTED`. Schedulers send them before they take the machine, terminals
when they are closed."""
HANDLED = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that end a run early. Ranks start with them blocked, because they cannot handle them while they import."""


def handle_signals(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[signal.Signals] = HANDLED
) -> dict[signal.Signals, Any]:
    """Install `handler`, but not for signals that this process was started to ignore; returns the former handlers."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    return {number: signal.signal(number, handler) for number in heard}


def begin_handling_signals() -> None:
    """Exit with one line when a signal arrives from now on, or arrived while this rank imported."""
    handle_signals(_stop_before_training)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def ignore_stop_signals() -> None:
    """Let this process, which is leaving, finish: torch's agent sends SIGTERM once one rank has ended."""
    handle_signals(lambda *_: None, STOP_SIGNALS)  # not SIG_IGN, which Python complains of if a signal is pending


def _stop_before_training(number: int, _frame: FrameType | None) -> NoReturn:
    ignore_stop_signals()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Preempted(f"stopped by {signal.Signals(number).name} outside training: run the same command again.")
