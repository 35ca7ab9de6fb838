"""Progress on the console: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

from tqdm.contrib import DummyTqdmFile

from toolkit.progress_bar import progress
from toolkit.run.console import columns, metrics_line
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

REDRAW_S = 0.5
"""Least time between two drawings of the bar."""
BAR, TIMES = 20, 20
"""Columns of the bar, and of the times behind it with what is between."""
LINE_S = 5.0
"""Least time between two lines, evaluations apart."""


class Progress(Callback):
    """Progress bar of log steps. Draws only on the main process, and only on a terminal."""

    def __init__(self) -> None:
        self._shown = ExitStack()
        self._printed = float("-inf")
        self._print: Callable[[str], None] = lambda text: None  # noqa: ARG005
        self._max_steps = 0
        self._began: tuple[float, int] | None = None
        """When the first step of this process ended, and which it was."""

    def on_fit_start(self, trainer: Trainer) -> None:
        if not trainer.run.is_main:
            return
        self._max_steps, self._print = trainer.max_steps, trainer.run.print
        trainer.run.add_sink(self)
        self._bar = progress(
            trainer.max_steps,
            "",
            initial=trainer.state.step,
            bar_format=f"{{bar:{BAR}}} {{desc}} {{elapsed}}<{{remaining}}",
            mininterval=REDRAW_S,
        )
        self._shown.enter_context(self._bar)
        self._prints_steps = self._bar.disable or not sys.stdout.isatty()
        """Whether log steps are lines: without a bar, or in a file."""
        if not self._bar.disable:  # what is printed during training goes above the bar
            above: Any = DummyTqdmFile(sys.__stderr__)
            self._shown.enter_context(redirect_stderr(above))
            if not self._prints_steps:
                self._shown.enter_context(redirect_stdout(above))

    def on_step_end(self, trainer: Trainer) -> None:
        if not trainer.run.is_main:
            return
        if self._began is None:
            self._began = (time.perf_counter(), trainer.state.step)
        self._bar.update(trainer.state.step - self._bar.n)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Show one log step: next to the bar, or as a line when it is time for one. Evaluations are lines."""
        now = time.perf_counter()
        line = metrics_line(values, step, self._max_steps, self._seconds_left(now, step), columns())
        evaluated = any(name.startswith(("eval/", "validation/")) for name in values)
        beside = metrics_line(values, step, self._max_steps, width=columns() - BAR - TIMES)
        self._bar.set_description_str(beside, refresh=False)
        if evaluated or (self._prints_steps and now - self._printed >= LINE_S):
            self._printed = now
            self._print(line)

    def _seconds_left(self, now: float, step: int) -> float | None:
        """At the speed since the first step; None at the end, and where it is not known."""
        began, first = self._began or (now, step)
        if step <= first or step >= self._max_steps:
            return None
        return (now - began) / (step - first) * (self._max_steps - step)

    def on_fit_end(self, *_: Any, **__: Any) -> None:
        self._shown.close()

    on_exception = on_fit_end
