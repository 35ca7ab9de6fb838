"""A wrapper that isolates training from tracker failures."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.errors import one_line

QUEUE_LENGTH = 2000
"""Maximum queued calls before a slow tracker is turned off."""
CLOSE_S = 10.0
"""Seconds that the end of a run waits for a tracker."""
LONGEST_LIST = 64
"""Maximum items of a list, such as expert loads, that become separate metrics. W&B gets a histogram of a longer one."""

Table = Sequence[Sequence[float]]


class Backend:
    """A tracker that can fail in any way. One thread calls all methods except `kill`."""

    name: str

    def start(self) -> str | None:
        """Start, and return a notice for the user, if any."""

    def log(self, values: Mapping[str, float | list[float]], step: int) -> None:
        """Log the metrics of a step."""

    def log_images(self, images: Mapping[str, bytes], step: int) -> None:
        """Log contents of image files by name. A name keeps the images of all steps."""

    def log_results(self, results: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        """Log the final numbers of a run, and tables of numbers, a list per row."""

    def finish(self, *, failed: bool) -> None:
        """End the tracker's run; `failed`: the training run ended with an error."""

    def abandon(self) -> None:
        """Release resources that would disturb process exit. The last call, also after a failure."""

    def kill(self) -> None:
        """Unblock a call that hangs on the other thread, if possible."""


class GuardedTracker:
    """A backend on its own thread.

    Training only adds calls to a bounded queue. Any failure turns the tracker off and prints one line. Closing takes at
    most `CLOSE_S`, or twice as long if the tracker hangs. metrics.jsonl is not affected.
    """

    def __init__(self, backend: Backend, say: Callable[[str], None]):
        self.backend, self._say = backend, say
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{backend.name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log one step."""
        self._call(lambda: self.backend.log(expand(values), step))

    def log_images(self, images: Mapping[str, bytes], step: int) -> None:
        """Log contents of image files of a step by name."""
        self._call(lambda: self.backend.log_images(images, step))

    def log_results(self, results: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        """Log the final numbers and tables of the run."""
        self._call(lambda: self.backend.log_results(results, tables))

    def close(self, *, failed: bool = False) -> None:
        """End the tracker; `failed` tells it that the run ended with an error."""
        self._call(lambda: self.backend.finish(failed=failed))
        self._call(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._turn_off(f"no answer for {CLOSE_S:.0f} s")
            with contextlib.suppress(Exception):
                self.backend.kill()
            self._thread.join(CLOSE_S)  # or W&B prints a traceback at exit

    def _call(self, call: Callable[[], None] | None) -> None:
        if self._off.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._turn_off("too slow")

    def _work(self) -> None:
        # BaseException: sys.exit in a library, or an interrupt, must not end the thread with a traceback.
        try:
            if notice := self.backend.start():
                self._say(notice)
            while not self._off.is_set() and (call := self._calls.get()) is not None:
                call()
        except BaseException as error:
            self._turn_off(one_line(error))
        with contextlib.suppress(BaseException):
            self.backend.abandon()

    def _turn_off(self, reason: str) -> None:
        if not self._off.is_set():
            self._off.set()
            self._say(f"{self.backend.name} is off for this run ({reason}); metrics.jsonl has every line.")


def expand(values: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """Expand each list to one metric per item: name/00, name/01, ...; keep lists longer than `LONGEST_LIST`; drop
    tables."""
    flat: dict[str, float | list[float]] = {}
    for name, value in values.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            items = {i: item for i, item in enumerate(value) if isinstance(item, (int, float))}
            if len(items) > LONGEST_LIST:
                flat[name] = [items.get(i, 0.0) for i in range(len(value))]
            else:
                flat |= {f"{name}/{i:02d}": item for i, item in items.items()}
        elif value is not None:
            flat[name] = value
    return flat
