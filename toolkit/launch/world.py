"""Starting the ranks of a run, refusing a launch whose world size is not what was asked for, leaving with a code.

`--num-processes` starts its ranks here and not through a launcher, because launchers turn every exit code into 1 and a
line of explanation into 13 to 42. `accelerate launch` and `torchrun` work as well; what they get wrong without a
message is refused by `check_world`. Torch is imported only inside functions: bad input is refused before it is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

from toolkit.config.run import RunConfig
from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER_ERROR, Preempted, UserError
from toolkit.launch.children import GRACE_S, STOP_SIGNALS, Children, handle_signals

PREEMPTED_GRACE_S = 60.0
"""How long the other ranks may go on saving once one was preempted, in seconds; after any other failure `GRACE_S`."""
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
BLOCKED = {signal.SIGINT, *STOP_SIGNALS}
"""Signals that ranks are started with blocked, so that none comes while they import and cannot handle it yet."""
REPORT_PIPE = "TOOLKIT_REPORT_PIPE"
"""The file descriptor on which ranks send `report` lines to the process that started them."""


# --- the world size ----------------------------------------------------------------------------------------------


def launched_world() -> int | None:
    """How many processes the launcher of this one started, or None where there was none."""
    for name in WORLD_SIZES:
        if value := os.environ.get(name):
            if not value.isdecimal() or int(value) < 1:
                raise UserError(f"{name}={value} in the environment is no number of processes: unset it.")
            return int(value)
    return None


def must_start_processes(num_processes: int | None) -> bool:
    """Whether several processes are asked for and this is not yet one of them."""
    return (num_processes or 1) > 1 and launched_world() is None


def check_world(config: RunConfig) -> None:
    """Raise UserError unless as many processes run as were asked for, and they will find each other."""
    world = launched_world()
    asked = config.num_processes
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if _is_set(f"ACCELERATE_USE_{plugin}"):
            raise UserError(
                f"this launch asks for {plugin}, which would treat experts as replicated: "
                "use accelerate_configs/ddp.yaml, with --dense-parallel fsdp2 to shard the other parameters."
            )
    if world is None:
        told, _ = _accelerate_launch_orders()
        if told > 1 and told != asked:
            raise UserError(
                f"`accelerate launch` was told to start {told} processes and started one, as it does without GPUs: "
                f"use `python {sys.argv[0]} --num-processes {told}`, or accelerate_configs/ddp_cpu.yaml."
            )
        return
    if asked not in (None, world):
        raise UserError(
            f"--num-processes {asked}: the launcher started {world}: leave the flag out, or make the two numbers equal."
        )
    if world > 1:
        _check_devices(world, config.cpu)


def _check_devices(world: int, cpu: bool) -> None:
    """Raise UserError where Accelerate would let each of several processes train alone."""
    if not any(name in os.environ for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")):
        raise UserError(f"WORLD_SIZE={world} is set but RANK is not: use a launcher, or unset it.")
    if cpu or _is_set("ACCELERATE_USE_CPU"):
        return
    import torch

    devices = torch.accelerator.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if devices == 0 and (REPORT_PIPE in os.environ or _accelerate_launch_orders()[1]):
        # `use_cpu: true` beside MULTI_GPU reaches the launcher but not the ranks, which then train without each other.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    elif devices < here or "LOCAL_RANK" not in os.environ:
        has = "none" if devices == 0 else f"only {devices}"
        raise UserError(
            f"this launch of {here} processes asks for GPUs and this machine has {has}: "
            "add --cpu to rehearse on the CPU, or start fewer."
        )


def _is_set(name: str) -> bool:
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
    from toolkit.compat import launch_config  # which imports torch

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


# --- starting ranks ----------------------------------------------------------------------------------------------


def start_processes(config: RunConfig) -> int:
    """Run this command as each of `config.num_processes` ranks of one world; returns the exit code for this process.

    Signals are forwarded to every rank. When a rank fails, the others get a few seconds and are then killed.
    """
    count = config.num_processes or 1
    inbox, outbox = os.pipe()
    os.set_blocking(inbox, False)
    reserved = reserve_port()
    environment = os.environ | {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": bound_port(reserved),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _num_cores() // count))),
        REPORT_PIPE: str(outbox),
    }
    if config.cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    try:
        with Children() as ranks:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
            for rank in range(count):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.start([sys.executable, *sys.orig_argv[1:]], env=environment | place, pass_fds=(outbox,))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            failed = ranks.wait(grace_s=lambda failed: _grace_s(failed, ranks))
            code, cause = _meaning(failed, ranks)
            cause += [
                f"error: rank {rank} of {count} was stopped (SIGSTOP) and did not end." for rank in _stopped(ranks)
            ]
    finally:
        reserved.close()
        os.close(outbox)
        lines = _drain(inbox)
    # Ranks that fail alike report the same line: it is shown once.
    for line in dict.fromkeys([*lines, *cause]):
        sys.stderr.write(line + "\n")
    return code


def _grace_s(failed: Mapping[int, int], ranks: Children) -> float:
    is_saving = _meaning(failed, ranks)[0] == EXIT_PREEMPTED and not _stopped(ranks)
    return PREEMPTED_GRACE_S if is_saving else GRACE_S


def _meaning(failed: Mapping[int, int], ranks: Children) -> tuple[int, list[str]]:
    """The exit code of this process, given those of the ranks that failed first, and a line where they wrote none."""
    for code in (EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED):
        if code in failed.values():
            return code, []
    for rank, code in failed.items():
        if code < 0 and -code in ranks.received:  # it had not installed its own handler yet
            return (EXIT_INTERRUPTED if -code == signal.SIGINT else EXIT_PREEMPTED), []
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (by the system, if memory ran out)" if name == "SIGKILL" else ""
            return EXIT_BUG, [f"error: rank {rank} of {len(ranks.processes)} was ended by {name}{hint}."]
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


def reserve_port() -> socket.socket:
    """A socket whose port (`bound_port`) no other process is given until it is closed, but on which a rank may listen.

    Two sockets may be bound to one port where both allow it and at most one listens; torch's store allows it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def bound_port(reserved: socket.socket) -> str:
    """The port of `reserve_port`, as MASTER_PORT has it."""
    return str(reserved.getsockname()[1])


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _drain(inbox: int) -> list[str]:
    with os.fdopen(inbox, "rb") as pipe:
        return (pipe.read() or b"").decode(errors="replace").splitlines()


# --- leaving -----------------------------------------------------------------------------------------------------


def report(message: str, label: str = "error: ") -> None:
    """Write one line to stderr, however many ranks call this."""
    line = label + " ".join(message.split()) + "\n"
    _on_stop_signals(signal.SIG_IGN)  # this process is leaving already
    with contextlib.suppress(KeyError, OSError):
        os.write(int(os.environ[REPORT_PIPE]), line.encode())
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Another launcher ends all ranks as soon as one leaves: let rank 0 write. If this rank still runs after that
        # time, then it alone has something to report.
        _on_stop_signals(signal.SIG_DFL)
        time.sleep(GRACE_S)
    with contextlib.suppress(OSError):  # a terminal that was closed
        sys.stderr.write(line)
        sys.stderr.flush()


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


def is_timeout(error: Exception) -> bool:
    """Whether `error` says that a collective waited in vain: gloo's and NCCL's words for it."""
    waited = re.search(r"timed out waiting|collective operation timeout", str(error), re.IGNORECASE)
    return isinstance(error, RuntimeError) and waited is not None


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
