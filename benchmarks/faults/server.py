"""Starts scripts in processes that have imported their libraries: forks of a server that imported them once.

A script runs as `python script.py words` would run it, from its first line on. The ranks that it starts are forks, too.
The server adopts what these processes leave behind, so that a process that outlives its run is found.

    python benchmarks/faults/server.py SOCKET        started by `Server`
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.forked_python import Fork, fork_ranks

PRELOADED = (
    "torch._dynamo",  # which DDP imports when the first model is wrapped
    "matplotlib.pyplot",
    "psutil",
    "tyro",
    "toolkit.run.cli",
    "toolkit.data.images",
    "toolkit.dynamic.dynamic_layer",
    "toolkit.train.build",
)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_S = 0.005
STACKS = signal.SIGUSR2
"""The signal at which a script and its ranks write their Python stacks to stderr."""


# --- the side of the benchmark ----------------------------------------------------------------------------------------


class Process:
    """A script that a server runs."""

    def __init__(self, server: Server, pid: int, pipes: Sequence[int]):
        self.server, self.pid, self._pipes = server, pid, pipes
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, negative for a signal, or None where it still runs after `timeout_s`."""
        if self.returncode is None:
            self.returncode = self.server.ask(order="wait", pid=self.pid, timeout_s=timeout_s)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def output(self) -> list[str]:
        """What it wrote to stdout and stderr so far. Can be called once."""
        texts = []
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
            with os.fdopen(pipe, "rb") as opened:
                texts.append((opened.read() or b"").decode(errors="replace"))
        return texts


class Server:
    """A server in a process of its own, until it is closed. For one thread."""

    def __init__(self) -> None:
        mine, its = socket.socketpair()
        with its:
            words = [sys.executable, __file__, str(its.fileno())]
            env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg"}
            env |= {"PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
        self._socket = mine
        self._answers = mine.makefile("r")

    def start(self, words: Sequence[str], env: Mapping[str, str], cwd: Path, inside: str, *, anew: bool) -> Process:
        """Start the script `words[0]` after the Python code `inside`; with `anew`, in a Python of its own."""
        pipes = [os.pipe() for _ in range(2)]
        for read, write in pipes:
            with contextlib.suppress(OSError):
                import fcntl

                fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, 2**20)  # nobody reads it until the process has ended
            os.set_inheritable(write, True)
        order = {"words": list(words), "env": dict(env), "cwd": str(cwd), "inside": inside, "anew": anew}
        pid = self.ask(*(write for _, write in pipes), order="start", **order)
        for _, write in pipes:
            os.close(write)
        return Process(self, pid, [read for read, _ in pipes])

    def left_behind(self, grace_s: float) -> list[str]:
        """The processes that still run `grace_s` after all that were started have ended; they are killed."""
        return self.ask(order="left behind", grace_s=grace_s)

    def ask(self, *descriptors: int, **order: Any) -> Any:
        """The server's answer to an order."""
        message = json.dumps(order).encode() + b"\n"
        socket.send_fds(self._socket, [message[:1]], descriptors)
        self._socket.sendall(message[1:])
        if not (line := self._answers.readline()):
            raise RuntimeError("the server of forks has ended")
        return json.loads(line)

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        self.process.wait()


# --- the server -------------------------------------------------------------------------------------------------------


def run_script(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a script in this process, from its first line on; returns its exit code."""
    os.environ.clear()
    os.environ.update(env)
    faulthandler.register(STACKS)
    sys.argv = list(words)
    sys.orig_argv = [sys.executable, *words]
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _start(order: Mapping[str, Any], descriptors: Sequence[int]) -> Any:
    if order["anew"]:
        inside, words = order["inside"], order["words"]
        code = (
            f"import runpy, sys\nsys.argv = sys.argv[1:]\n{inside}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        return subprocess.Popen(
            [sys.executable, *(["-c", code] if inside else []), *words],
            env=order["env"],
            cwd=order["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=descriptors[0],
            stderr=descriptors[1],
        )

    def run() -> NoReturn:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        for descriptor in (*descriptors, *_kept_open):
            os.close(descriptor)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        fork_ranks(run_script)
        sys.path.insert(0, str(Path(order["words"][0]).parent))
        exec(order["inside"], {"__name__": "planted"})
        os._exit(run_script(order["words"], dict(os.environ)))

    return Fork(run)


_kept_open: list[int] = []


def _left_behind(grace_s: float) -> list[str]:
    import psutil

    deadline = time.monotonic() + grace_s
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = psutil.Process().children(recursive=True)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    named = []
    for child in left:
        with contextlib.suppress(psutil.Error):
            named.append(" ".join(child.cmdline())[:200])
            child.kill()
    return named


def _read_a_command_line() -> None:
    """Have what a recipe reads its flags with fill its caches."""
    from toolkit.run.cli import parse
    from toolkit.run.config.experts import DynamicRunConfig

    parse({"debug": DynamicRunConfig}, ["--cpu"])


def serve(link: socket.socket) -> None:
    """Answer orders, one line each, until the other side is closed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A benchmark in the background, or under nohup, was told to ignore these, and scripts would be, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for name in PRELOADED:
        importlib.import_module(name)
    _read_a_command_line()
    gc.collect()
    gc.freeze()
    _kept_open.append(link.fileno())
    running: dict[int, Any] = {}
    while True:
        first, descriptors, _, _ = socket.recv_fds(link, 1, 2)
        if not first:
            return
        line = first
        while not line.endswith(b"\n"):
            line += link.recv(2**16)
        order = json.loads(line)
        answer: Any = None
        if order["order"] == "start":
            child = _start(order, descriptors)
            running[child.pid] = child
            answer = child.pid
            for descriptor in descriptors:
                os.close(descriptor)
        elif order["order"] == "wait":
            deadline = time.monotonic() + order["timeout_s"]
            child = running[order["pid"]]
            while (answer := child.poll()) is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if answer is not None:
                del running[order["pid"]]
        else:
            answer = _left_behind(order["grace_s"])
        link.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # modules of this folder are not those of a script
    serve(socket.socket(fileno=int(sys.argv[1])))
