"""Faults that are planted in a process before its recipe begins: they come at a chosen call of a chosen phase.

Calls are those that the main thread makes in files of the toolkit, and in those of Python that it reads and writes
files with. The phases are those of `Trainer`, and "start" and "finish" before and after it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

FILES = (f"{os.sep}toolkit{os.sep}", f"{os.sep}pathlib.py", f"{os.sep}shutil.py", f"{os.sep}filelock{os.sep}")
NOBODY = 65534


class Calls:
    """Counts the calls of each phase, and has `seen` called with the phase, the call's number and the step."""

    def __init__(self, seen: Callable[[str, int, int], None]):
        from toolkit.run.run import Run
        from toolkit.train.trainer import Trainer

        self.seen = seen
        self.numbers: Counter[str] = Counter()
        self.phase, self.step = "start", 0
        self._enter, self._finish = Trainer.enter.__code__, Run.finish.__code__
        self._counted: dict[str, bool] = {}

    def begin(self) -> None:
        """From now on, in this process and in its forks, each of which counts for itself."""
        os.register_at_fork(after_in_child=self.numbers.clear)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_call"):
            return
        code = frame.f_code
        if event == "call":
            if code is self._enter:
                self.phase, self.step = frame.f_locals["phase"], frame.f_locals["self"].state.step
            elif code is self._finish:
                self.phase = "finish"
        counted = self._counted.get(code.co_filename)
        if counted is None:
            counted = self._counted[code.co_filename] = any(part in code.co_filename for part in FILES)
        if counted:
            self.numbers[self.phase] += 1
            self.seen(self.phase, self.numbers[self.phase], self.step)


def is_rank(rank: int) -> bool:
    """Whether this process is `rank` of its world, and not what starts the ranks."""
    from toolkit.run.launch.restarts import LAUNCH

    starts_ranks = {"--num-processes", "--max-restarts"} & set(sys.argv) and LAUNCH not in os.environ
    return not starts_ranks and os.environ.get("RANK", "0") == str(rank)


def count(folder: str) -> None:
    """Write the number of calls of each phase to `folder` when a rank leaves."""
    from toolkit.run.launch import exits

    calls = Calls(lambda *_: None)
    leave = exits.leave

    def write_and_leave(code: int) -> NoReturn:
        sys.setprofile(None)
        rank = int(os.environ.get("RANK", "0"))
        if is_rank(rank):
            Path(folder, f"calls-{rank}.json").write_text(json.dumps(calls.numbers))
        leave(code)

    exits.leave = write_and_leave
    calls.begin()


def at(folder: str, phase: str, fraction: float, do: Callable[[], object], *, rank: int = 0) -> Calls:
    """Have `do` called on `rank`, after `fraction` of the calls of `phase` that were counted into `folder`.

    Only at the first start of the run, and once.
    """
    from toolkit.run.launch.restarts import past_restarts

    counted_before = json.loads(Path(folder, f"calls-{rank}.json").read_text())
    number = 1 + int(0.9 * fraction * counted_before[phase])

    def seen(now: str, counted: int, step: int) -> None:
        if now == phase and counted >= number and is_rank(rank):
            sys.setprofile(None)
            if not past_restarts():
                name = getattr(do, "__name__", "fault")
                where = f"in the phase {phase} after step {step} at {time.monotonic():.1f} s"
                os.write(2, f"fault: {name} {where}\n".encode())
                do()

    watching = Calls(seen)
    watching.begin()
    return watching


def blank_pictures() -> None:
    """Pictures are files without a picture: half of the time that these small runs take is matplotlib's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def write_nothing(_: FigureCanvasAgg, file: IO[bytes], **_options: Any) -> None:
        file.write(b"no picture")

    FigureCanvasAgg.print_png = write_nothing  # type: ignore[method-assign, assignment]


def signalling(number: signal.Signals, *, parent: bool = False) -> Callable[[], None]:
    """A fault: this process, or the one that started it, gets a signal."""

    def send() -> None:
        os.kill(os.getppid() if parent else os.getpid(), number)

    send.__name__ = number.name
    return send


def no_room(limit: int, calls: int) -> Callable[[], None]:
    """A fault: files cannot get longer than `limit` bytes, as on a full disk, until after so many calls."""

    def no_room() -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

        def seen(*_: Any) -> None:
            if sum(until.numbers.values()) >= calls:
                sys.setprofile(None)
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        until = Calls(seen)
        until.begin()

    return no_room


def read_only(folder: str) -> Callable[[], None]:
    """A fault: nothing in `folder` can be written any more; not even by root, who becomes nobody."""

    def read_only() -> None:
        for path, _, names in os.walk(folder):
            for name in names:
                os.chmod(os.path.join(path, name), 0o444)
            os.chmod(path, 0o555)
        if os.geteuid() == 0:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)

    return read_only


def remove(path: str) -> Callable[[], None]:
    """A fault: a file or a folder is gone."""

    def removed() -> None:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    return removed


def kill_wandb() -> None:
    """A fault: W&B's service is killed, as soon as there is one."""
    import psutil

    from toolkit.compat import is_wandb_service

    for _ in range(600):
        services = [child for child in psutil.Process().children() if is_wandb_service(child.name())]
        if services:
            break
        time.sleep(0.05)
    for service in services:
        service.kill()
