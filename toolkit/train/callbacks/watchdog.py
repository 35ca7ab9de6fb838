"""Ends a run whose step does not end, and says which rank it waits for."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from toolkit.errors import EXIT_BUG
from toolkit.run.folder import write_text
from toolkit.run.launch.exits import end_from_a_thread
from toolkit.train.callbacks.base import OF_A_STEP, Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

STEPS_OF_LIMIT, LEAST_LIMIT_S = 20, 120.0
LEARN_STEPS = 5
"""Steps before the median counts: the first ones compile, and fill caches."""
HANG = "hang"


@dataclass(frozen=True)
class Report:
    """Actions of a rank while some rank's step takes too long."""

    rank: int
    late: bool
    """Whether this rank's own step takes too long; else it reports because another one does."""
    step: int
    phase: str
    frame: str
    """The innermost Python frame of the main thread that is not torch's."""


class Watchdog(Callback):
    """Ends all ranks (exit code 1) when the next step does not begin within `limit_s` seconds.

    By default the limit is 20 times the median step, at least two minutes and at most `longest_s`, as for the first
    steps. A step includes its data and all callbacks. An evaluation batch, a save, and the end of training do not
    count, and may take `longest_s` each. At the limit a thread of the rank writes its Python stacks to `hang/` in the
    run's folder, where those of other ranks see it and write theirs. The lowest rank that is late says which ranks do
    not answer, or where each is. A process that was suspended as a whole, or is in a debugger, is not hung.
    `Run.finish` is watched too; between `fit` and that it is the caller's turn, without a limit.
    """

    def __init__(self, *, limit_s: float | None = None, longest_s: float = 600.0):
        self.limit_s, self.longest_s = limit_s, longest_s
        self._seconds: deque[float] = deque(maxlen=101)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def limit_of(self, phase: str) -> float:
        """Seconds that `phase` of a trainer may take now."""
        if phase == "end":
            return math.inf
        if phase not in OF_A_STEP:
            return self.longest_s
        if self.limit_s is not None:
            return self.limit_s
        if len(self._seconds) < LEARN_STEPS:
            return self.longest_s
        return min(self.longest_s, max(LEAST_LIMIT_S, STEPS_OF_LIMIT * median(list(self._seconds))))

    def on_fit_start(self, trainer: Trainer) -> None:
        self._seconds.clear()
        self._stop.clear()
        _file_of(trainer.run.folder, trainer.run.rank).unlink(missing_ok=True)  # of a hang before
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(trainer,), name="watchdog", daemon=True)
        self._thread.start()
        trainer.run.watch(trainer.enter, self._end)

    def on_step_end(self, trainer: Trainer) -> None:
        self._seconds.append(time.monotonic() - trainer.phase_began)

    def _end(self, *_: Any, **__: Any) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    on_exception = _end

    # --- the thread -------------------------------------------------------------------------------------------

    def _watch(self, trainer: Trainer) -> None:
        asleep_since, paused, began = time.monotonic(), 0.0, 0.0
        every = 0.0
        while not self._stop.wait(every):
            now = time.monotonic()
            overslept = now - asleep_since - every
            asleep_since = now
            limit = self.limit_of(trainer.phase)
            every = min(2.0, limit / 5)
            if trainer.phase_began != began:
                began, paused = trainer.phase_began, 0.0
            if overslept > 2 * every:  # the process was suspended, and so was its main thread
                paused += overslept
            if now - began - paused > limit:
                self._end_run(trainer, began, every, limit)
            elif (trainer.run.folder / HANG).exists():
                self._report(trainer, late=False)

    def _report(self, trainer: Trainer, *, late: bool) -> Report | None:
        """Write what this rank does, with its stacks; None in a debugger."""
        stacks = _stacks()
        frames = _frames(stacks, self._main)
        if any(os.path.basename(name) in ("bdb.py", "pdb.py") for name, _, _ in frames):
            return None
        run = trainer.run
        report = Report(
            rank=run.rank,
            late=late,
            step=trainer.state.step,
            phase=trainer.phase,
            frame=_own_frame(frames),
        )
        path = _file_of(run.folder, run.rank)
        with suppress(OSError):  # a full disk is no hang
            path.parent.mkdir(exist_ok=True)
            write_text(path, f"{json.dumps(asdict(report))}\n{stacks}", durable=False)
        return report

    def _end_run(self, trainer: Trainer, began: float, every: float, limit: float) -> None:
        mine = self._report(trainer, late=True)
        if mine is None:
            return
        run = trainer.run
        # The others notice meanwhile. Those that do not are stopped or gone.
        until = time.monotonic() + 2 * every + 1
        while time.monotonic() < until:
            if self._stop.wait(every) or trainer.phase_began != began:
                shutil.rmtree(run.folder / HANG, ignore_errors=True)
                return  # it went on after all
        # Of other machines, which may have folders of their own, nothing is known.
        found = {rank: _read(_file_of(run.folder, rank)) for rank in run.ranks_here} | {run.rank: mine}
        reports = [report for report in found.values() if report is not None]
        if run.rank != min(report.rank for report in reports if report.late):
            time.sleep(1.0)  # so that the line is out before a launcher ends all
            os._exit(EXIT_BUG)
        # In `finish` the main process may go on alone, while the others have ended as they should.
        silent = [rank for rank, report in found.items() if report is None and mine.phase != "finish"]
        flag = "--step-timeout" if mine.phase in OF_A_STEP else "--process-timeout"
        end_from_a_thread(
            f"error: {what_ranks_do(reports, silent, run.world_size)} It took longer than {limit:g} s ({flag}); stacks "
            f"are in {run.folder / HANG}."
        )


def what_ranks_do(reports: Sequence[Report], silent: Sequence[int], count: int) -> str:
    """A sentence that names those of `count` ranks that do not answer, or where each is: the fewest first, because the
    others wait for them as a rule."""
    if silent:
        return f"rank {silent[0]} of {count} does not answer: it is stopped, frozen or gone."
    places: dict[tuple[int, str, str], list[int]] = {}
    for report in reports:
        places.setdefault((report.step, report.phase, report.frame), []).append(report.rank)
    ordered = sorted(places.items(), key=lambda item: (len(item[1]), item[0]))
    words = [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} of {count} in {frame}, in the phase "
        f"{phase!r} after step {step:,}"
        for (step, phase, frame), ranks in ordered
    ]
    return f"the run does not go on: {'; '.join(words)}."


def _stacks() -> str:
    """The Python stacks of all threads, as `faulthandler` prints them.

    It holds the interpreter meanwhile. Frame objects of a thread that runs on, read one by one, may be freed under the
    reader: that ended processes with a segmentation fault.
    """
    with suppress(OSError), tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
    return ""


def _frames(stacks: str, thread: int) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of `thread` in `stacks`, from the innermost outwards."""
    printed = stacks.partition(f"0x{thread:016x}")[2]
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', printed.partition("\n\n")[0])
    return [(name, int(line), function) for name, line, function in frames]


def _own_frame(frames: Sequence[tuple[str, int, str]]) -> str:
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame[0]] or list(frames)
    if not own:
        return "an unknown place"
    name, line, function = own[0]
    return f"{function} ({os.sep.join(name.split(os.sep)[-2:])}:{line})"


def _file_of(folder: Path, rank: int) -> Path:
    return folder / HANG / f"rank-{rank:05d}.txt"


def _read(path: Path) -> Report | None:
    try:
        return Report(**json.loads(path.read_text(encoding="utf-8").partition("\n")[0]))
    except (OSError, ValueError, TypeError):
        return None
