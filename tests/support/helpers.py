"""Running a function on several gloo processes, and running a recipe as a user would."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]

# A forkserver imports the slow libraries once; each rank is then a fork of that clean process.
fork_context = multiprocessing.get_context("forkserver")
fork_context.set_forkserver_preload(["tests.support.preloaded"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(pipe: Connection, rank: int, world_size: int, port: int, fn: Callable[..., Any], args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world_size > 1:
            store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        pipe.send_bytes(pickle.dumps((True, fn(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300) -> list[Any]:
    """Call module-level `fn(*args)` on `world_size` fresh gloo processes; returns each rank's result.

    The process group is initialised; `fn` reads its rank from it. The first rank that raises fails the call with that
    rank's traceback and the others are killed, as they are when `timeout_s` runs out.
    """
    import torch.distributed as dist

    store, port = None, 0  # a process by itself takes whatever is free when it asks
    if world_size > 1:
        # The store holds its port: another process could take a port that was only found to be free.
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        port = store.port
    pipes, ranks = [], []
    for rank in range(world_size):
        mine, theirs = fork_context.Pipe(duplex=False)
        process = fork_context.Process(target=_rank_main, args=(theirs, rank, world_size, port, fn, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        ranks.append(process)
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(results) < world_size:
            for rank, pipe in enumerate(pipes):
                if rank in results or not pipe.poll(0.01):
                    continue
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise AssertionError(f"rank {rank} of {world_size} died without a word") from None
                if not ok:
                    raise AssertionError(f"rank {rank} of {world_size} raised:\n{value}")
                results[rank] = value
            if time.monotonic() > deadline:
                missing = sorted(set(range(world_size)) - set(results))
                raise AssertionError(f"rank(s) {missing} of {world_size} gave no answer within {timeout_s} s")
    finally:
        for process in ranks:
            if len(results) < world_size:
                process.kill()
            process.join(10)
    return [results[rank] for rank in range(world_size)]


def peak_bytes(profile: torch.profiler.profile) -> int:
    """Return the peak of allocated bytes in `profile`, made with `profile_memory`."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def planted(link: Path) -> Path:
    """Return a file that must not change, the target of `link`."""
    precious = link.with_name(f"{link.name}.precious")
    precious.write_text("precious")
    link.symlink_to(precious)
    return precious


def program_environment(**more: str) -> dict[str, str]:
    """Return this environment without run settings: offline, on one thread per process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOOLKIT_", "ACCELERATE_", "WANDB_"))}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def run_recipe(
    recipe: str, *args: str, env: dict[str, str] | None = None, timeout_s: float = 300, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `recipes/<recipe>.py` from the repository root, in a new process (others: `tests.support.forked_python`)."""
    command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *args]
    environment = program_environment(**(env or {}))
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )
