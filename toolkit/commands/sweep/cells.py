"""Execution of sweep cells. Finished cells are skipped; interrupted cells continue from their checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from toolkit.commands.sweep.grid import Cell
from toolkit.errors import EXIT_DONE, EXIT_PREEMPTED, UserError, last_line
from toolkit.run.config.settings import decides_what_is_learned
from toolkit.run.folder import read_json, results_of
from toolkit.run.launch.signals import handle_signals
from toolkit.run.recipe_script import Recipe
from toolkit.run.summary import duration

POLL_S = 0.05


@dataclass
class Outcome:
    """Cells of a sweep by outcome."""

    done: list[Cell] = field(default_factory=list)
    elsewhere: list[Cell] = field(default_factory=list)
    """Cells in progress in another job."""
    failed: list[Cell] = field(default_factory=list)
    stopped: bool = False
    """Stopped by a signal: the same command continues."""


class CellRunner:
    """Runner for cells of `recipe` in subfolders of `folder`, at most `jobs` at a time."""

    def __init__(self, recipe: Recipe, folder: Path, *, jobs: int, log: Callable[[str], None]):
        self.recipe, self.folder, self.jobs, self.log = recipe, folder, jobs, log

    def results(self, cell: Cell) -> dict[str, Any] | None:
        """Return the final numbers of `cell`, or None if unfinished."""
        return results_of(self.folder / cell.digest)

    def run(self, cells: Sequence[Cell], finished: Callable[[Cell], object] = lambda _: None) -> Outcome:
        """Run the cells without results; `finished` is called after each that succeeds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for cell in cells:
            self._check_defaults(cell)
        outcome = Outcome(done=[cell for cell in cells if self.results(cell) is not None])
        waiting = [cell for cell in cells if cell not in outcome.done]
        if outcome.done:
            self.log(f"{len(outcome.done)} of {len(cells)} runs are done already")
        received: list[int] = []
        handlers = handle_signals(lambda number, _: received.append(number))
        seconds: list[float] = []
        try:
            with ThreadPoolExecutor(self.jobs) as pool:
                running = {pool.submit(self._run, cell, received): cell for cell in waiting}
                try:
                    for future in as_completed(running):
                        cell = running[future]
                        if isinstance(future.exception(), Timeout):
                            outcome.elsewhere.append(cell)
                            continue
                        code, took = future.result()
                        self._end(cell, code, outcome)
                        if code == EXIT_DONE and took is not None:
                            seconds.append(took)
                            left = sum(not other.done() for other in running)
                            self.log(self._progress(cell, len(outcome.done), len(cells), left, seconds))
                            finished(cell)
                except BaseException:
                    received += [signal.SIGINT, signal.SIGINT]  # kills the runs
                    raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        outcome.stopped |= bool(received)
        return outcome

    def _check_defaults(self, cell: Cell) -> None:
        """Raise UserError if the folder of `cell` holds a run from before a default changed."""
        path = self.folder / cell.digest / "config.json"
        remedy = f"Delete {path.parent}, and run the same command again to repeat that run"
        before = read_json(path, remedy) if path.exists() else {}
        for name, value in cell.config.items():
            if decides_what_is_learned(name) and before.get(name, value) != value:
                raise UserError(
                    f"--out {self.folder.parent}: {cell} was run with {name} {before[name]}, now {value}. "
                    f"Choose another folder, or delete {path.parent}."
                )

    def _run(self, cell: Cell, received: Sequence[int]) -> tuple[int, float | None]:
        """Run `cell` in a process, to which signals in `received` are forwarded.

        Returns its exit code, and its seconds, None if it was not started. Raises Timeout if another job runs it.
        """
        lock = FileLock(self.folder / f"{cell.digest}.lock", timeout=0)
        with lock, (self.folder / f"{cell.digest}.log").open("ab") as log:
            if self.results(cell) is not None:
                return EXIT_DONE, None
            if received:
                return EXIT_PREEMPTED, None
            words = [*self.recipe.arguments, *cell.flags, "--run-dir", str(self.folder / cell.digest)]
            sweep = self.folder.parent.name
            tags = ",".join(filter(None, [os.environ.get("WANDB_TAGS"), f"sweep {sweep}"]))
            labels = {"WANDB_RUN_GROUP": sweep, "WANDB_NAME": str(cell)} | os.environ | {"WANDB_TAGS": tags}
            began, sent = time.monotonic(), 0
            process = subprocess.Popen(
                [sys.executable, str(self.recipe.script), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=labels,
                start_new_session=True,  # Ctrl-C in a terminal reaches only the sweep
            )
            while process.poll() is None:
                time.sleep(POLL_S)
                while sent < len(received):  # the first Ctrl-C is forwarded as SIGTERM, to save and exit
                    process.send_signal(signal.SIGKILL if received.count(signal.SIGINT) > 1 else signal.SIGTERM)
                    sent += 1
            return process.returncode, time.monotonic() - began

    def _end(self, cell: Cell, code: int, outcome: Outcome) -> None:
        if code == EXIT_DONE:
            outcome.done.append(cell)
        elif code == EXIT_PREEMPTED:
            outcome.stopped = True
        else:
            outcome.failed.append(cell)
            path = self.folder / f"{cell.digest}.log"
            self.log(f"failed: {cell} ({last_line(path).rstrip('.')}; all of it is in {path})")

    def _progress(self, cell: Cell, done: int, total: int, left: int, seconds: Sequence[float]) -> str:
        numbers = self.results(cell) or {}
        accuracy = f": test accuracy {numbers['test_accuracy']:.2%}" if "test_accuracy" in numbers else ""
        remaining = left / self.jobs * sum(seconds) / len(seconds)
        more = f", about {duration(remaining)} to go" if left else ""
        return f"{done}/{total} {cell}{accuracy} ({duration(seconds[-1])}{more})"
