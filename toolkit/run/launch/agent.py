"""Launch of the ranks of `--num-processes` with torch's elastic agent, and restarts after crashes (`--max-restarts`).

The agent starts, watches and ends processes. Its own restarts are off, because it would also restart after bad input
and preemption, and it loses the exit code after a signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

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
from toolkit.run.hardware import usable_cores
from toolkit.run.launch.exits import LOST, STOPPED
from toolkit.run.launch.restarts import LAUNCH, restarted, stopped_at_once, told_folder
from toolkit.run.launch.signals import HANDLED, handle_signals

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

POLL_S = 0.05


def must_start_processes(config: RunConfig) -> bool:
    """Return whether this process has to launch ranks and is not a rank itself."""
    return launched_world() is None and ((config.num_processes or 1) > 1 or config.max_restarts > 0)


def start_processes(config: RunConfig) -> int:
    """Run this command on `config.num_processes` ranks, and return the exit code for this process.

    Signals are forwarded to every rank. After a crash, all ranks are restarted from the newest checkpoint, up to
    `config.max_restarts` times. After a step ran out of memory, they are restarted with smaller micro-batches, which
    does not count.
    """
    from toolkit.run.folder import is_finished

    count = config.num_processes or 1
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch's server listens on all interfaces
    if count > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    if config.cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    logging.disable(logging.CRITICAL)  # the agent logs each failure itself
    received: list[int] = []
    handle_signals(lambda number, _: received.append(number))
    reasons: list[str] = []
    crashes = 0
    while True:
        with tempfile.TemporaryDirectory(prefix="toolkit-") as launch:
            failed = _run_ranks(count, Path(launch), received)
            folder = told_folder(Path(launch))
        if failed is None:
            return EXIT_DONE
        rank, failure = failed
        code = failure.exitcode if failure.exitcode > 0 else EXIT_BUG
        said = _explain(rank, count, failure)
        if received.count(signal.SIGINT) > 1:
            code, said = EXIT_INTERRUPTED, stopped_at_once(config.run_dir, folder) if folder else STOPPED
            if sys.stderr.isatty():
                said = f"\x1b[?25h{said}"  # shows the cursor, which a killed progress bar has hidden
        elif received and code == EXIT_SMALLER_BATCHES:
            code = EXIT_PREEMPTED
        reasons.append(said.strip().rpartition("\n")[2].removeprefix("error: "))
        if code != EXIT_SMALLER_BATCHES:
            sys.stderr.write(f"{said.rstrip()}\n")
        if received or code in (EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED):
            return code
        if code == EXIT_SMALLER_BATCHES:
            sys.stderr.write(f"restart: {reasons[-1]}\n")
        elif crashes == config.max_restarts:
            return code
        elif folder is not None and is_finished(folder):
            sys.stderr.write(f"the run in {folder} is finished, so it is not restarted.\n")
            return EXIT_DONE
        else:
            crashes += 1
            sys.stderr.write(f"restart {crashes} of {config.max_restarts}: {reasons[-1]}\n")
        os.environ.update(restarted(folder, reasons))


def _run_ranks(count: int, launch: Path, received: Sequence[int]) -> tuple[int, ProcessFailure] | None:
    """Run this command on `count` ranks, and return the rank whose failure ended the others, and the failure.

    The agent runs in a thread with blocked signals, which ranks inherit. `LAUNCH` is set for them only: errors of the
    launcher are its own to report.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    agent = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_configs={"store_type": "file"},
            rdzv_endpoint=str(launch / "rendezvous"),
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(str(launch)),
        ),
        sys.executable,
    )
    os.environ[LAUNCH] = str(launch)
    try:
        with ThreadPoolExecutor(1, initializer=partial(signal.pthread_sigmask, signal.SIG_BLOCK, HANDLED)) as pool:
            running = pool.submit(agent, *sys.orig_argv[1:])
            _pass_on(received, running)
            running.result()
    except ChildFailedError as failed:
        return min(failed.failures.items(), key=lambda item: _consequence(item[1]))  # the first of those detected
    finally:
        del os.environ[LAUNCH]
    return None


def _consequence(failure: ProcessFailure) -> int:
    """Return 0 for a failure that can be the cause of others, 1 after SIGTERM, which the agent sends to the other
    ranks, and 2 for a rank that has lost another."""
    if _told(failure) == LOST:
        return 2
    return 1 if failure.exitcode == EXIT_PREEMPTED else 0


def _pass_on(received: Sequence[int], running: Future[object]) -> None:
    """Forward each signal in `received` to each rank once until the agent is done; a second Ctrl-C kills the ranks."""
    sent: dict[int, int] = {}
    while not wait([running], POLL_S).done:
        for rank in psutil.Process().children() if received else ():
            for number in received[sent.get(rank.pid, 0) :]:
                with suppress(psutil.Error, ProcessLookupError):
                    if number == signal.SIGINT and received.count(number) > 1:
                        os.killpg(rank.pid, signal.SIGKILL)
                    else:
                        rank.send_signal(number)
            sent[rank.pid] = len(received)


def _told(failure: ProcessFailure) -> str:
    """Return the rank's message from `tell`, if any."""
    return failure.message if failure.error_file != "<N/A>" else ""


def _explain(rank: int, count: int, failure: ProcessFailure) -> str:
    if told := _told(failure):
        return told
    who = f"rank {rank} of {count}" if count > 1 else "the process"
    if failure.exitcode > 0:
        return f"error: {who} exited with code {failure.exitcode}."
    name = failure.signal_name()
    return f"error: {who} was ended by {name}{' (by the system, if memory ran out)' if name == 'SIGKILL' else ''}."
