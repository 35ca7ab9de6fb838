"""Progress on the console: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from toolkit.run.console import can_redraw, columns, metrics_line
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

REDRAW_S = 0.5
"""Least time between two drawings of the bar: no thread draws it, and drawing takes about a millisecond."""
BAR, TIMES = 20, 20
"""Columns of the bar, and of the times behind it with what is between."""
LINE_S = 5.0
"""Least time between two lines, evaluations apart."""


class Progress(Callback):
    """Progress bar of log steps. Draws only on the main process, and only on a terminal."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._drawn = self._printed = float("-inf")
        self._print: Callable[[str], None] = lambda text: None  # noqa: ARG005
        self._max_steps = 0
        self._began: tuple[float, int] | None = None
        """When the first step of this process ended, and which it was."""

    def on_fit_start(self, trainer: Trainer) -> None:
        if not trainer.run.is_main:
            return
        self._max_steps, self._print = trainer.max_steps, trainer.run.print
        trainer.run.add_sink(self)
        if can_redraw():
            self._bar = RichProgress(
                BarColumn(BAR),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task("", total=trainer.max_steps)
            self._bar.start()

    def on_step_end(self, trainer: Trainer) -> None:
        if not trainer.run.is_main:
            return
        now = time.perf_counter()
        if self._began is None:
            self._began = (now, trainer.state.step)
        if self._bar is not None and now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._bar.update(self._task, completed=trainer.state.step, refresh=True)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Show one log step: next to the bar, or as a line when it is time for one. Evaluations are lines."""
        now = time.perf_counter()
        line = metrics_line(values, step, self._max_steps, self._seconds_left(now, step), columns())
        evaluated = any(name.startswith(("eval/", "validation/")) for name in values)
        if self._bar is not None:
            beside = metrics_line(values, step, self._max_steps, width=columns() - BAR - TIMES)
            self._bar.update(self._task, completed=step, description=beside)
        if evaluated or (self._bar is None and now - self._printed >= LINE_S):
            self._printed = now
            self._print(line)

    def _seconds_left(self, now: float, step: int) -> float | None:
        """At the speed since the first step; None at the end, and where it is not known."""
        began, first = self._began or (now, step)
        if step <= first or step >= self._max_steps:
            return None
        return (now - began) / (step - first) * (self._max_steps - step)

    def on_fit_end(self, *_: Any, **__: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    on_exception = on_fit_end
