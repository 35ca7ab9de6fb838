"""Signals that stop a run, and their handling outside training."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from toolkit.errors import Preempted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals to save at the next step and exit with `EXIT_PREEMPTED`, sent by schedulers before preemption and by closing
terminals."""
HANDLED = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that end a run early. Ranks start with them blocked, because they cannot handle them during imports."""


def handle_signals(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[signal.Signals] = HANDLED
) -> dict[signal.Signals, Any]:
    """Install `handler`, except for signals ignored at process start, and return the previous handlers."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    return {number: signal.signal(number, handler) for number in heard}


def begin_handling_signals() -> None:
    """Exit with one line if a signal arrives from now on, or arrived during imports."""
    handle_signals(_stop_before_training)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def ignore_stop_signals() -> None:
    """Ignore signals while this process exits: torch's agent sends SIGTERM once one rank has ended."""
    handle_signals(lambda *_: None, STOP_SIGNALS)  # with SIG_IGN, Python complains about pending signals


def _stop_before_training(number: int, _frame: FrameType | None) -> NoReturn:
    ignore_stop_signals()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Preempted(f"stopped by {signal.Signals(number).name} outside training: run the same command again.")
