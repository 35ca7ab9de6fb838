"""Distributed functions on gloo processes, and recipes as subprocesses."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# The fork server imports slow libraries once; each rank is a fork of this clean process.
fork_context = multiprocessing.get_context("forkserver")
fork_context.set_forkserver_preload(["benchmarks.support.preloaded"])


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
    """Call `fn(*args)` on `world_size` new gloo processes and return the result of each rank.

    `fn` has to be defined at module level and runs with an initialized process group. Raises AssertionError with the
    traceback of the first rank that fails, or if a rank exits or `timeout_s` runs out; the other ranks are killed.
    """
    import torch.distributed as dist

    store, port = None, 0
    if world_size > 1:
        # The store holds its port from here on: another process could take a port that is only known to be free.
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        port = store.port
    pipes, ranks = [], []
    for rank in range(world_size):
        receiver, sender = fork_context.Pipe(duplex=False)
        process = fork_context.Process(target=_rank_main, args=(sender, rank, world_size, port, fn, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
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
                    raise AssertionError(f"rank {rank} of {world_size} exited without a result") from None
                if not ok:
                    raise AssertionError(f"rank {rank} of {world_size} raised:\n{value}")
                results[rank] = value
            if time.monotonic() > deadline:
                missing = sorted(set(range(world_size)) - set(results))
                raise AssertionError(f"rank(s) {missing} of {world_size} timed out after {timeout_s} s")
    finally:
        for process in ranks:
            if len(results) < world_size:
                process.kill()
            process.join(10)
    return [results[rank] for rank in range(world_size)]


def program_environment(**variables: str) -> dict[str, str]:
    """Return this environment without run settings, with `variables`: offline, with one thread per process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOOLKIT_", "ACCELERATE_", "WANDB_"))}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables


def run_recipe(recipe: str, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `recipes/<recipe>.py` in a new process, from the repository root."""
    command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *args]
    environment = program_environment(**(env or {}))
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
