"""Processes: starting those that were asked for, refusing a world that is not what was asked, leaving with a code.

`--num-processes` starts its ranks here and not through a launcher, because launchers turn every exit code into 1 and a
line of explanation into 13 to 42. `accelerate launch` and `torchrun` work as well; what they get silently wrong is
refused by `check_world`. Torch is imported only inside functions: bad input is answered before it would be loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from toolkit.config.run import RunConfig
from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER_ERROR, Preempted, UserError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Save at the next step and leave with `EXIT_PREEMPTED`. What a scheduler sends before it takes the machine."""
GRACE_S = {EXIT_PREEMPTED: 60.0}
DEFAULT_GRACE_S = 5.0
"""How long the other ranks may go on once one has left with a code other than 0, in seconds."""
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
REPORT_PIPE = "TOOLKIT_REPORT_PIPE"
"""The file descriptor on which ranks hand `report` lines to the process that started them."""
PR_SET_PDEATHSIG = 1


# --- the world that is, and the world that was asked for ---------------------------------------------------------


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
    """Raise UserError unless the processes that run are those that were asked for, and will find each other."""
    world, asked = launched_world(), config.num_processes
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if _is_set(f"ACCELERATE_USE_{plugin}"):
            raise UserError(
                f"this launch asks for {plugin}, which would take experts for copies: "
                "use accelerate_configs/ddp.yaml, with --dense-parallel fsdp2 to cut the other parameters into pieces."
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
        # `use_cpu: true` beside MULTI_GPU reaches the launcher but not the ranks, which then run as solo copies.
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
    """Run `config.num_processes` copies of this command as the ranks of one world; returns the exit code they mean.

    Signals go to every rank. When a rank fails the others get a few seconds and are then ended; when this process
    is killed the kernel ends them all (on Linux).
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
    ranks: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL if received.count(signal.SIGINT) > 1 else number)

    before = {number: signal.signal(number, forward) for number in (*STOP_SIGNALS, signal.SIGINT)}
    die_with_parent = _die_with_parent()
    try:
        for rank in range(count):
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *sys.orig_argv[1:]],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(outbox,),
                    process_group=0,  # Ctrl-C reaches this process only, which passes it on once
                    preexec_fn=die_with_parent,
                )
            )
            for number in received:
                ranks[-1].send_signal(number)
        code, cause = _wait(ranks, received)
    finally:
        for rank_process in ranks:
            if rank_process.poll() is None:
                os.killpg(rank_process.pid, signal.SIGKILL)
                rank_process.wait()
        reserved.close()
        os.close(outbox)
        lines = _drain(inbox)
        for number, handler in before.items():
            signal.signal(number, handler)
    # Ranks that fail alike say the same line: it is shown once.
    for line in dict.fromkeys([*lines, *cause]):
        sys.stderr.write(line + "\n")
    return code


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> tuple[int, list[str]]:
    """Wait for all ranks, or for the grace that follows a failure; the first failure's code, and a line about it."""
    code, cause, deadline = EXIT_DONE, list[str](), float("inf")
    while None in [rank.poll() for rank in ranks] and time.monotonic() < deadline:
        if code == EXIT_DONE:
            code, cause = _first_failure(ranks, received)
            deadline = time.monotonic() + GRACE_S.get(code, DEFAULT_GRACE_S) if code else deadline
        time.sleep(0.05)
    return (code, cause) if code else _first_failure(ranks, received)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> tuple[int, list[str]]:
    """The exit code that the ended ranks mean together, and a line about it where they could not say it themselves."""
    codes = {rank.returncode: place for place, rank in reversed(list(enumerate(ranks))) if rank.returncode}
    for code in (EXIT_USER_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED):
        if code in codes:
            return code, []
    for code, place in codes.items():
        if code < 0 and -code in received:  # it had not come far enough to handle the signal
            return (EXIT_INTERRUPTED if -code == signal.SIGINT else EXIT_PREEMPTED), []
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (by the system, if memory ran out)" if name == "SIGKILL" else ""
            return EXIT_BUG, [f"error: rank {place} of {len(ranks)} was ended by {name}{hint}."]
    return max(codes, default=EXIT_DONE), []


def _die_with_parent() -> Callable[[], object] | None:
    """A function for the child between fork and exec: the kernel kills it when its parent dies (Linux only)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reserve_port() -> socket.socket:
    """A socket whose port nobody else is given until it is closed, but on which a rank may listen: `bound_port`.

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
    """One line on stderr, however many ranks say it."""
    line = label + " ".join(message.split()) + "\n"
    _on_stop_signals(signal.SIG_IGN)  # this process is leaving already
    with contextlib.suppress(KeyError, OSError):
        os.write(int(os.environ[REPORT_PIPE]), line.encode())
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Another launcher ends all ranks as soon as one leaves: let the first one speak. If this one still runs after
        # that time, then it alone has something to say.
        _on_stop_signals(signal.SIG_DFL)
        time.sleep(DEFAULT_GRACE_S)
    sys.stderr.write(line)
    sys.stderr.flush()


def _on_stop_signals(handler: signal.Handlers) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


def stop_before_training(number: int, _frame: FrameType | None) -> NoReturn:
    """Signal handler for the time in which there is nothing to save."""
    raise Preempted(f"stopped by {signal.Signals(number).name} outside training: run the same command again.")


def leave(code: int) -> NoReturn:
    """End this process with `code`. With an error it does not wait for ranks that may be gone."""
    _on_stop_signals(signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if code != EXIT_DONE:
            os._exit(code)
        distributed.destroy_process_group()
    sys.exit(code)
