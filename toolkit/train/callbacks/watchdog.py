"""Ends a run whose step does not end, and says which rank it waits for."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from toolkit.errors import EXIT_BUG
from toolkit.run.folder import write_text
from toolkit.run.launch.restarts import send
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

WATCHED = ("data", "step")
"""The phases of a trainer that are alike each time; evaluations, saves and callbacks may take any time."""
STEPS_OF_LIMIT, LEAST_LIMIT_S = 20, 120.0
LEARN_STEPS = 5
"""Steps before the median counts: the first ones compile, and fill caches."""
HEARTBEATS, STACKS = ".heartbeats", "hang"
COLLECTIVES = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "torch/autograd/graph.py",  # backward passes, DDP's reductions among them
    # On a GPU a collective returns at once, and the host waits where it reads what came of one.
    "torch/cuda/__init__.py",
    "torch/accelerator/__init__.py",
    "toolkit/experts/layer/dispatch/dispatch.py",
    "toolkit/experts/layer/dispatch/hierarchical_dispatch.py",
    "toolkit/train/metrics.py",
    "toolkit/train/callbacks/throughput.py",
)
"""Where the innermost Python frame of a rank is that waits for others."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank's watchdog thread last wrote about it."""

    rank: int
    where: str
    """Host and process id."""
    step: int
    phase: str
    seconds: float
    """In that phase."""
    frame: str
    """The innermost Python frame of the main thread that is not torch's."""
    waits: bool
    """Whether the main thread is in one of `COLLECTIVES`."""
    at: float
    """When it was written, on the host's wall clock."""


class Watchdog(Callback):
    """Ends all ranks (exit code 1) when a step, or the wait for its data, takes longer than `limit_s` seconds.

    By default the limit is 20 times the median of the run's own steps, at least two minutes and at most `longest_s`, as
    for the first steps. A thread of each rank writes a heartbeat into the run's folder. At the limit it writes the
    Python stacks of its rank to `hang/`; the lowest rank that still answers names the one that holds up the others:
    that does not answer, is behind, or is not in a collective. Costs the training thread two readings of the clock a
    step. A process that was suspended as a whole, or is in a debugger, is not hung.
    """

    def __init__(self, *, limit_s: float | None = None, longest_s: float = 600.0):
        self.limit_s, self.longest_s = limit_s, longest_s
        self._seconds: deque[float] = deque(maxlen=101)
        self._ended = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def limit(self) -> float:
        """Seconds that a step may take now."""
        if self.limit_s is not None:
            return self.limit_s
        if len(self._seconds) < LEARN_STEPS:
            return self.longest_s
        return min(self.longest_s, max(LEAST_LIMIT_S, STEPS_OF_LIMIT * median(list(self._seconds))))

    def on_fit_start(self, trainer: Trainer) -> None:
        self._seconds.clear()
        self._stop.clear()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(trainer,), name="watchdog", daemon=True)
        self._thread.start()

    def on_step_start(self, trainer: Trainer, micro_batches: list[Any]) -> None:  # noqa: ARG002
        self._ended = time.monotonic()

    def on_step_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        self._seconds.append(time.monotonic() - self._ended)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._end(trainer)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        folder = trainer.run.folder / HEARTBEATS
        with suppress(OSError):  # of the folder, which other ranks' files are still in
            (folder / _file_of(trainer.run.rank)).unlink(missing_ok=True)
            folder.rmdir()

    # --- the thread -------------------------------------------------------------------------------------------

    def _watch(self, trainer: Trainer) -> None:
        folder, rank = trainer.run.folder / HEARTBEATS, trainer.run.rank
        asleep_since, paused, began = time.monotonic(), 0.0, 0.0
        every = 0.0
        while not self._stop.wait(every):
            now = time.monotonic()
            overslept = now - asleep_since - every
            asleep_since = now
            every = min(2.0, self.limit / 5)
            if trainer.phase_began != began:
                began, paused = trainer.phase_began, 0.0
            if overslept > 2 * every:  # the process was suspended, and so was its main thread
                paused += overslept
            seconds = now - began - paused
            frames = _frames(self._main)
            heartbeat = Heartbeat(
                rank=rank,
                where=f"{socket.gethostname()}, process {os.getpid()}",
                step=trainer.state.step,
                phase=trainer.phase,
                seconds=round(seconds, 1),
                frame=_own_frame(frames),
                waits=_waits(frames),
                at=time.time(),
            )
            _write(folder / _file_of(rank), heartbeat)
            is_debugged = any(os.path.basename(name) in ("bdb.py", "pdb.py") for name, _, _ in frames)
            if trainer.phase in WATCHED and seconds > self.limit and not is_debugged:
                self._end_run(trainer, heartbeat, began, every)

    def _end_run(self, trainer: Trainer, mine: Heartbeat, began: float, every: float) -> None:
        run = trainer.run
        limit = self.limit
        stacks = run.folder / STACKS
        with suppress(OSError):
            stacks.mkdir(exist_ok=True)
            with (stacks / _file_of(run.rank, ".txt")).open("w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(mine)) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        # The others notice at about the same time. Those that do not write meanwhile are stopped or gone.
        began_to_wait = time.time()
        while time.time() < began_to_wait + 2 * every + 1:
            _write(run.folder / HEARTBEATS / _file_of(run.rank), replace(mine, at=time.time()))
            if self._stop.wait(every) or trainer.phase_began != began:
                return  # it went on after all
        heartbeats = [_read(run.folder / HEARTBEATS / _file_of(rank)) for rank in range(run.world_size)]
        # Of other machines, which may have folders of their own, nothing is known.
        answering = [rank for rank in run.ranks_here if (beat := heartbeats[rank]) and beat.at >= began_to_wait]
        silent = [rank for rank in run.ranks_here if rank not in answering]
        if run.rank != min(answering, default=run.rank):
            time.sleep(1.0)  # so that the line is out before a launcher ends all
            os._exit(EXIT_BUG)
        line = f"error: {blame(heartbeats, silent, mine)} Step {mine.step + 1:,} took longer than {limit:g} s "
        line += f"(--step-timeout); stacks are in {stacks}."
        if not send(line):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        os._exit(EXIT_BUG)


def blame(heartbeats: Sequence[Heartbeat | None], silent: Sequence[int], mine: Heartbeat) -> str:
    """A sentence that names the rank that the others wait for, as far as their heartbeats tell."""
    count = len(heartbeats)
    if silent:
        beat = heartbeats[silent[0]]
        last = "" if beat is None else f" since step {beat.step + 1:,} ({beat.where}), where it was in {beat.frame}"
        return f"rank {silent[0]} of {count} does not answer{last}: it is stopped, frozen or gone."
    beats = [beat for beat in heartbeats if beat is not None]
    if count == 1:
        return f"the process hangs in {mine.frame}, in the phase {mine.phase!r}."
    behind = min(beats, key=lambda beat: beat.step)
    if all(beat.step == behind.step for beat in beats):
        busy = [beat for beat in beats if not beat.waits]
        if len(busy) in (0, count):
            return f"no rank is behind the others; rank {mine.rank} of {count} is in {mine.frame}."
        behind = busy[0]
    return (
        f"rank {behind.rank} of {count} ({behind.where}) holds up the others: it is in {behind.frame}, in the phase "
        f"{behind.phase!r} of step {behind.step + 1:,}."
    )


def _frames(thread: int) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of `thread`, from the innermost outwards, as `faulthandler` prints them.

    It holds the interpreter meanwhile. Frame objects of a thread that runs on, read one by one, may be freed under the
    reader: that ended processes with a segmentation fault.
    """
    printed = ""
    with suppress(OSError), tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        _, _, printed = file.read().partition(f"0x{thread:016x}")
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', printed.partition("\n\n")[0])
    return [(name, int(line), function) for name, line, function in frames]


def _waits(frames: Sequence[tuple[str, int, str]]) -> bool:
    return any(part in name.replace(os.sep, "/") for name, _, _ in frames[:1] for part in COLLECTIVES)


def _own_frame(frames: Sequence[tuple[str, int, str]]) -> str:
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame[0]] or list(frames)
    if not own:
        return "an unknown place"
    name, line, function = own[0]
    return f"{function} ({os.sep.join(name.split(os.sep)[-2:])}:{line})"


def _file_of(rank: int, suffix: str = ".json") -> str:
    return f"rank-{rank:05d}{suffix}"


def _write(path: Path, heartbeat: Heartbeat) -> None:
    """Nothing of it may end a run: a full disk is no hang."""
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(asdict(heartbeat)), durable=False)


def _read(path: Path) -> Heartbeat | None:
    try:
        return Heartbeat(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
