"""Starting the ranks of `--num-processes`, and starting them again when one crashed (`--max-restarts`) or when a
step ran out of memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_SMALLER_BATCHES,
    EXIT_USER_ERROR,
)
from toolkit.experts.parallel.nodes import launched_world
from toolkit.run.config.run import RunConfig
from toolkit.run.launch.children import GRACE_S, Children, holding_signals
from toolkit.run.launch.port import reserve_port, world_environment
from toolkit.run.launch.restarts import CAUSE, FINISHED, FOLDER, REPORT_PIPE, STORE, restarted, stopped_at_once
from toolkit.run.launch.world import BLOCKED, usable_cores

PREEMPTED_GRACE_S = 60.0
"""How long the other ranks may go on saving once one was preempted, in seconds; after any other failure, and before the
run has a folder, `GRACE_S`."""
LONGEST_PAUSE_S = 60.0
"""Before a restart; the first follows after a second, and each further one after twice as long."""

STOPPED = "stopped by Ctrl-C."
SHOW_CURSOR = "\x1b[?25h"
"""A progress bar hides it, and a rank that is killed cannot bring it back."""


@dataclass(frozen=True)
class Attempt:
    """How the ranks ended."""

    code: int
    """The exit code of the run."""
    cause: str
    """Why, in a sentence, where a restart may help: a rank crashed, was killed, hung or lacked memory. Else empty."""
    folder: Path | None
    """Of the run, where it got as far as having one."""
    finished: bool
    """Whether the run got as far as having its results, summary and pictures."""


def must_start_processes(config: RunConfig) -> bool:
    """Whether ranks are to be started, or watched, by this process, and this is not yet one of them."""
    several = (config.num_processes or 1) > 1 or config.max_restarts > 0
    return several and launched_world() is None and REPORT_PIPE not in os.environ


def start_processes(config: RunConfig) -> int:
    """Run this command as each of `config.num_processes` ranks of one world; returns the exit code for this process.

    Signals are forwarded to every rank. When a rank fails, the others get a few seconds and are then killed. After a
    crash all are started again, up to `config.max_restarts` times; they continue from the newest checkpoint. A crash of
    a run that has its results already ends with `EXIT_DONE` where it would be started again. After a
    step that ran out of memory they are started at once, and that does not count: each time micro-batches are smaller.
    """
    reasons: list[str] = []
    crashes = 0
    environment: dict[str, str] = {}
    while True:
        attempt = _run_ranks(config, environment)
        if attempt.finished and attempt.cause and config.max_restarts:
            sys.stderr.write(f"the run in {attempt.folder} is finished, so it is not started again.\n")
            return EXIT_DONE
        if attempt.cause and attempt.code == EXIT_SMALLER_BATCHES:
            sys.stderr.write(f"restart: {attempt.cause}\n")
        elif not attempt.cause or crashes == config.max_restarts:
            return attempt.code
        else:
            pause_s = min(LONGEST_PAUSE_S, 2.0**crashes)
            crashes += 1
            sys.stderr.write(f"restart {crashes} of {config.max_restarts} in {pause_s:g} s: {attempt.cause}\n")
            time.sleep(pause_s)
        reasons.append(attempt.cause)
        environment = restarted(attempt.folder, reasons)


def _run_ranks(config: RunConfig, environment: Mapping[str, str]) -> Attempt:
    """Start every rank, wait until all have ended, and show what they reported, each line once."""
    count = config.num_processes or 1
    inbox = Inbox()
    reserved = reserve_port()  # for a program that makes a process group of its own
    meeting = tempfile.mkdtemp(prefix="toolkit-")
    shared = {**os.environ, **environment, **world_environment(count, reserved), REPORT_PIPE: str(inbox.end)}
    if count > 1:
        shared.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
        shared[STORE] = f"{meeting}/store"
    if config.cpu:
        shared["ACCELERATE_USE_CPU"] = "true"
    try:
        with Children() as ranks:
            with holding_signals(BLOCKED):
                for rank in range(count):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
                    ranks.start([sys.executable, *sys.orig_argv[1:]], env=shared | place, pass_fds=(inbox.end,))
            failed = ranks.wait(grace_s=lambda failed: _grace_s(failed, ranks, bool(_folders(inbox.lines()))))
            code, ended = _meaning(failed, ranks)
            stopped = [
                f"error: rank {rank} of {count} was stopped (SIGSTOP) and did not end." for rank in _stopped(ranks)
            ]
    finally:
        reserved.close()
        shutil.rmtree(meeting, ignore_errors=True)
        lines = inbox.lines()
        inbox.close()
    folders = _folders(lines)
    if ended == [STOPPED] and folders:
        ended = [stopped_at_once(config.run_dir, Path(folders[-1]))]
    if sys.stderr.isatty() and any((process.returncode or 0) < 0 for process in ranks.processes):
        sys.stderr.write(SHOW_CURSOR)
    shown = [line for line in lines if not line.startswith((FOLDER, CAUSE, FINISHED))]
    # Ranks that fail alike report the same line: it is shown once.
    for line in dict.fromkeys([*shown, *ended, *stopped]):
        sys.stderr.write(line + "\n")
    crashed = code not in (EXIT_DONE, EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED) and not ranks.received
    causes = [*ended, *shown, *stopped, *(line for line in lines if line.startswith(CAUSE)), f"exit code {code}."]
    cause = causes[0].removeprefix("error: ").removeprefix(CAUSE) if crashed else ""
    finished = any(line.startswith(FINISHED) for line in lines)
    return Attempt(code, cause, Path(folders[-1]) if folders else None, finished)


def _folders(lines: Sequence[str]) -> list[str]:
    """Returns those that ranks have named as the run's."""
    return [line.removeprefix(FOLDER) for line in lines if line.startswith(FOLDER)]


class Inbox:
    """A pipe, into whose `end` ranks write lines."""

    def __init__(self) -> None:
        self._begin, self.end = os.pipe()
        os.set_blocking(self._begin, False)
        self._received = bytearray()

    def lines(self) -> list[str]:
        """All that has come so far."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._begin, 2**16):
                self._received += chunk
        return self._received.decode(errors="replace").splitlines()

    def close(self) -> None:
        os.close(self.end)
        os.close(self._begin)


def _grace_s(failed: Mapping[int, int], ranks: Children, has_folder: bool) -> float:
    if stopped := _stopped(ranks):
        running = [rank for rank, process in enumerate(ranks.processes) if process.poll() is None]
        return 0.0 if running == stopped else GRACE_S
    may_save = has_folder and _meaning(failed, ranks)[0] in (EXIT_PREEMPTED, EXIT_INTERRUPTED)
    return PREEMPTED_GRACE_S if may_save else GRACE_S


def _meaning(failed: Mapping[int, int], ranks: Children) -> tuple[int, list[str]]:
    """The exit code of this process, given those of the ranks that failed first, and a line where they wrote none."""
    for code in (EXIT_USER_ERROR, EXIT_SMALLER_BATCHES, EXIT_PREEMPTED, EXIT_INTERRUPTED):
        if code in failed.values():
            # Who was told to stop meanwhile is not started again: the same command goes on.
            return (EXIT_PREEMPTED if code == EXIT_SMALLER_BATCHES and ranks.received else code), []
    for rank, code in failed.items():
        if code < 0 and -code in ranks.received:  # it had not installed its own handler yet
            return (EXIT_INTERRUPTED if -code == signal.SIGINT else EXIT_PREEMPTED), []
        if -code == signal.SIGKILL and ranks.received.count(signal.SIGINT) > 1:
            return EXIT_INTERRUPTED, [STOPPED]
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (by the system, if memory ran out)" if name == "SIGKILL" else ""
            count = len(ranks.processes)
            who = f"rank {rank} of {count}" if count > 1 else "the process"
            return EXIT_BUG, [f"error: {who} was ended by {name}{hint}."]
    return max(failed.values(), default=EXIT_DONE), []


def _stopped(ranks: Children) -> list[int]:
    """The ranks that have not ended because they are stopped, as by SIGSTOP or a debugger."""
    import psutil

    stopped = []
    for rank, process in enumerate(ranks.processes):
        with contextlib.suppress(psutil.Error):
            if process.poll() is None and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                stopped.append(rank)
    return stopped
