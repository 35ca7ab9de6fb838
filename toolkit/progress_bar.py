"""Progress bars of long work: drawn on a terminal only, by the main process, and erased at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from shutil import get_terminal_size
from threading import RLock
from typing import Any

from tqdm import tqdm

from toolkit.experts.parallel.collectives import is_main

DELAY_S = 1.0
"""Seconds of work before a bar is drawn."""
WIDTH = 80
"""Maximum columns of a bar, also on a wider terminal."""


class ProgressBar(tqdm):
    """tqdm's bar as all long work shows it, also if a library makes it."""

    monitor_interval = 0
    """No thread that draws."""

    def __init__(self, *args: Any, name: str | None = None, **options: Any):  # noqa: ARG002 (of the Hub's own bars)
        # One step of `miniters`, because otherwise a slow item after quick ones is not drawn.
        super().__init__(
            *args, **{"ncols": min(WIDTH, get_terminal_size().columns), "miniters": 1} | options | bar_options()
        )


# The default lock is one of processes, whose resource tracker would be started beside gloo's threads.
ProgressBar.set_lock(RLock())


def progress(work: Iterable[Any] | float, what: str, **options: Any) -> ProgressBar:
    """Return a progress bar of long work. It is not a collective.

    Args:
        work: Items to iterate over, or the total of the calls of `update`.
        what: Description, such as "tokenizing".
        options: Further options of tqdm.
    """
    items, total = (work, None) if isinstance(work, Iterable) else (None, work)
    return ProgressBar(items, total=total, desc=what, **options)


def bar_options() -> dict[str, Any]:
    """Return the options of tqdm that all bars share.

    The main process draws bars, if standard error is a terminal that can redraw.
    """
    return {
        "disable": not (is_main() and sys.stderr.isatty())
        or bool(os.environ.get("CI"))
        or os.environ.get("TERM") == "dumb",
        "leave": False,
        "delay": DELAY_S,
        "file": sys.__stderr__,  # sys.stderr is printed above the bar of training
    }
