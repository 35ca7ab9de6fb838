"""A wrapper that keeps failures of a tracker away from training."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import one_line

QUEUE_LENGTH = 2000
"""Calls that are queued for a slow tracker before it is turned off."""
CLOSE_S = 10.0
"""How long the end of a run waits for a tracker, in seconds."""
LONGEST_LIST = 64
"""Numbers of a list, such as the load of each expert, that become a metric each."""

Table = Sequence[Sequence[float]]


class Backend(Protocol):
    """A tracker that may fail in any way. All but `kill` are called on one thread."""

    name: str

    def start(self) -> str | None:
        """Begin; returns what the user should know, if anything."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def log_images(self, images: Mapping[str, Path]) -> None: ...

    def log_results(self, results: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        """Note the final numbers of a run, and tables of numbers, a list per row."""
        ...

    def finish(self, *, failed: bool) -> None:
        """End the tracker's run; `failed`: the training run ended with an error."""
        ...

    def abandon(self) -> None:
        """Release what would disturb the end of this process. The last call, also after a failure."""
        ...

    def kill(self) -> None:
        """Make a call that hangs on the other thread return, if there is a way."""
        ...


class GuardedTracker:
    """Runs a backend on a thread of its own, from start to end.

    Training only puts calls into a bounded queue. Any failure turns the tracker off and prints one line. Closing takes
    `CLOSE_S` at most, and two seconds more for a tracker that hangs. metrics.jsonl has every line in any case.
    """

    def __init__(self, backend: Backend, say: Callable[[str], None]):
        self.backend, self._say = backend, say
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{backend.name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Have one line of metrics logged."""
        self._call(lambda: self.backend.log(expand(values), step))

    def log_images(self, images: Mapping[str, Path]) -> None:
        """Have picture files logged under their names."""
        self._call(lambda: self.backend.log_images(images))

    def log_results(self, results: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        """Have the final numbers of the run noted, and its tables."""
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
            self._thread.join(2.0)

    def _call(self, call: Callable[[], None] | None) -> None:
        if self._off.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._turn_off("too slow")

    def _work(self) -> None:
        # BaseException: a library that calls sys.exit, or an interrupt meant for it, must not end the thread loudly.
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


def expand(values: Mapping[str, Any]) -> dict[str, float]:
    """`values` with each list as one metric per item: name/00, name/01, ... up to `LONGEST_LIST`; without tables."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            items = enumerate(value[:LONGEST_LIST])
            flat |= {f"{name}/{i:02d}": item for i, item in items if isinstance(item, (int, float))}
        elif value is not None:
            flat[name] = value
    return flat
