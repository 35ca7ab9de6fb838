"""Refusing a launch whose world size is not what was asked for, and leaving with an exit code.

`--num-processes` starts its ranks here and not through a launcher, because launchers turn every exit code into 1 and a
line of explanation into 13 to 42. `accelerate launch` and `torchrun` work as well; what they get wrong without a
message is refused by `check_world`. Torch is imported only inside functions: bad input is refused before it is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from toolkit.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_SMALLER_BATCHES,
    Preempted,
    StepOutOfMemory,
    UserError,
)
from toolkit.experts.parallel.nodes import launched_world, ranks_per_node
from toolkit.run.config.run import RunConfig
from toolkit.run.launch.children import GRACE_S, STOP_SIGNALS, handle_signals
from toolkit.run.launch.restarts import CAUSE, ELASTIC, REPORT_PIPE, RESTARTED, STORE, past_restarts, restarted, send

OF_A_LAUNCHER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_"),
    *("PMI_", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", REPORT_PIPE, RESTARTED, ELASTIC, STORE),
)
"""Beginnings of environment variables that make a process a rank of a world, or one that is started again."""
BLOCKED = {signal.SIGINT, *STOP_SIGNALS}
"""Signals that ranks are started with blocked, so that none comes while they import and cannot handle it yet."""


# --- the world size ----------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what a launcher put there: for a program that is no rank of this process's world."""
    return {name: value for name, value in environment.items() if not name.startswith(OF_A_LAUNCHER)}


def check_world(config: RunConfig) -> None:
    """Raise UserError unless as many processes run as were asked for, and they will find each other."""
    world = launched_world()
    asked = config.num_processes
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if is_set(f"ACCELERATE_USE_{plugin}"):
            raise UserError(
                f"this launch asks for {plugin}, which would treat experts as replicated: "
                "use accelerate_configs/ddp.yaml, with dense_parallel='fsdp2' to shard the other parameters."
            )
    if world is None:
        told, _ = _accelerate_launch_orders()
        if told > 1 and told != asked:
            raise UserError(
                f"`accelerate launch` was told to start {told} processes and started one, as it does without GPUs: "
                f"use num_processes={told} without it, or accelerate_configs/ddp_cpu.yaml."
            )
        place = os.environ.get("LOCAL_RANK", "-1")  # of which Accelerate takes -1 for no place in a world
        if place != "-1" and asked in (None, 1):
            raise UserError(f"LOCAL_RANK={place} is set but WORLD_SIZE is not: use a launcher, or unset it.")
        return
    if asked not in (None, world):
        remedy = f"the launcher started {world}: leave it out, or make the two numbers equal"
        raise UserError(field="num_processes", value=asked, remedy=remedy)
    if config.max_restarts and REPORT_PIPE not in os.environ:
        remedy = "the launcher must start its processes again: leave it out, and give torchrun its own --max-restarts"
        raise UserError(field="max_restarts", value=config.max_restarts, remedy=remedy)
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and config.run_dir is None:
        remedy = "the launcher may start the processes again: give one, where they find their run"
        raise UserError(field="run_dir", remedy=remedy)
    if world > 1:
        _check_devices(world, config.cpu)


def _check_devices(world: int, cpu: bool) -> None:
    """Raise UserError where Accelerate would let each of several processes train alone."""
    if not any(name in os.environ for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")):
        raise UserError(f"WORLD_SIZE={world} is set but RANK is not: use a launcher, or unset it.")
    if cpu or is_set("ACCELERATE_USE_CPU"):
        return
    import torch

    devices = torch.accelerator.device_count()
    here = ranks_per_node(world)
    if devices == 0 and (REPORT_PIPE in os.environ or _accelerate_launch_orders()[1]):
        # `use_cpu: true` beside MULTI_GPU reaches the launcher but not the ranks, which then train without each other.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    elif devices < here or "LOCAL_RANK" not in os.environ:
        has = "none" if devices == 0 else f"only {devices}"
        raise UserError(
            f"this launch of {here} processes asks for GPUs and this machine has {has}: "
            "add cpu=True to rehearse on the CPU, or start fewer."
        )


def is_set(name: str) -> bool:
    """Whether the environment says yes to `name`."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def _accelerate_launch_orders() -> tuple[int, bool]:
    """How many processes the `accelerate launch` above this one was told to start, and whether on the CPU.

    (1, False) where there is no such parent. Its own count is not in the environment when it starts only one.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # which it always sets
        return 1, False
    import psutil

    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return 1, False
    if not any("accelerate" in os.path.basename(word) for word in words[:3]):
        return 1, False
    from toolkit.integrations.accelerate.compat import launch_config

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--num_processes", "--num-processes", type=int)
    parser.add_argument("--config_file", "--config-file")
    parser.add_argument("--cpu", action="store_true")
    # The command of the launcher ends with ours.
    told, _ = parser.parse_known_args(words[: len(words) - len(sys.argv[1:])])
    config = None if told.cpu and not told.config_file else launch_config(told.config_file)
    if config is not None:
        return told.num_processes or getattr(config, "num_processes", 1), told.cpu or config.use_cpu
    return told.num_processes or 1, told.cpu


# --- leaving -----------------------------------------------------------------------------------------------------


def report(message: str, label: str = "error: ") -> None:
    """Write one line to stderr, however many ranks call this."""
    line = label + " ".join(message.split()) + "\n"
    _on_stop_signals(signal.SIG_IGN)  # this process is leaving already
    if send(line):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Another launcher ends all ranks as soon as one leaves: let rank 0 write. If this rank still runs after that
        # time, then it alone has something to report.
        _on_stop_signals(signal.SIG_DFL)
        time.sleep(GRACE_S)
    with contextlib.suppress(OSError):  # a terminal that was closed
        sys.stderr.write(line)
        sys.stderr.flush()


def end_from_a_thread(line: str) -> NoReturn:
    """Write `line` and end this process, whose main thread hangs."""
    if not send(line):
        with contextlib.suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
    os._exit(EXIT_BUG)


def _on_stop_signals(handler: signal.Handlers) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


def stop_before_training(number: int, _frame: FrameType | None) -> NoReturn:
    """Signal handler for the time in which there is nothing to save."""
    raise Preempted(f"stopped by {signal.Signals(number).name} outside training: run the same command again.")


def begin_handling_signals() -> None:
    """Leave in one line when a signal comes from now on, or came while `start_processes` had it blocked."""
    handle_signals(stop_before_training)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)


def lost_process(error: Exception) -> str | None:
    """Returns what `error` says of another process: gloo's or NCCL's words for one that hangs or has ended. None for
    others."""
    if not isinstance(error, RuntimeError):
        return None
    if connecting := re.search(r"timed out after .* trying to connect to \((\S+), (\d+)\)", str(error)):
        return _no_answer(":".join(connecting.groups()))
    if re.search(r"timed out waiting|collective operation timeout", str(error), re.IGNORECASE):
        return "another process did not answer within --process-timeout: it hangs or is gone."
    gone = r"connection (closed|reset) by peer|connection was likely closed|broken pipe|remote process exited"
    if re.search(gone, str(error), re.IGNORECASE):
        return "another process has ended, and this one cannot go on without it."
    return None


def _no_answer(where: str) -> str:
    return (
        f"the first process did not answer at {where} within --process-timeout: start it, or correct MASTER_ADDR and "
        "MASTER_PORT."
    )


@contextmanager
def meeting_within(minutes: float) -> Iterator[None]:
    """End this process where it does not find the others in time. Torch waits without end for the first byte of an
    answer, as of another program's port that accepts and stays silent."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or os.environ.get("RANK") == "0" or STORE in os.environ:
        yield
        return
    line = f"error: {_no_answer(f'{address}:{port}')}"
    timer = threading.Timer(66 * minutes + 1, end_from_a_thread, [line])  # what torch notices itself comes first
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def start_again(error: StepOutOfMemory) -> NoReturn:
    """Have this run started again, with the smaller micro-batches that its folder knows of.

    The process that started the ranks does it; a process by itself is replaced by a new one, which gives all memory
    back. A launcher's rank leaves with `EXIT_PREEMPTED`: the launcher, or the same command, starts it again.
    """
    if send(f"{CAUSE}{error}"):
        leave(EXIT_SMALLER_BATCHES)
    if launched_world() is not None:
        report(f"{error} Run the same command again.", label="")
        leave(EXIT_PREEMPTED)
    for worker in multiprocessing.active_children():  # of a data loader: they would outlive this program
        worker.kill()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(f"restart: {error}\n")
        sys.stderr.flush()
    environment = os.environ | restarted(error.folder, [*past_restarts(), str(error)])
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def leave(code: int) -> NoReturn:
    """End this process with `code`; with an error, without waiting for ranks that may be gone."""
    _on_stop_signals(signal.SIG_IGN)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if code != EXIT_DONE:
            os._exit(code)
        distributed.destroy_process_group()
    sys.exit(code)
