"""Python programs in forks of a process with imported libraries, for end-to-end tests.

A fork starts to train within a tenth of a second; a new process needs several seconds for imports. Tests of imports and
process start-up use `subprocess`.
"""

from __future__ import annotations

import ast
import atexit
import logging
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from benchmarks.support.processes import ROOT, fork_context, program_environment


class ForkedPython:
    """A forked `python *words` with the interface of `subprocess.Popen`; its ranks are forks of the program.

    Output is written to temporary files, or to `output`. `python` is the interpreter that launchers start; a command of
    `forked_commands` makes their processes forks, too.
    """

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        output: Path | None = None,
        python: str = sys.executable,
    ):
        self._folder = None if output else tempfile.TemporaryDirectory()
        self._streams = [output or Path(self._folder.name) / name for name in ("out", "err")]
        environment = program_environment() if env is None else dict(env)
        streams = [Path(os.devnull), *self._streams]
        self._process = fork_context.Process(target=_main, args=(words, environment, cwd, streams, python))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self._streams)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout, out, err)
        self._folder.cleanup()
        return out, err


def run_forked(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = 300,
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` as `subprocess.run` does."""
    program = ForkedPython(*words, env=env, cwd=cwd, python=python)
    try:
        out, err = program.communicate(timeout_s)
    finally:
        program.kill()
    return subprocess.CompletedProcess(words, program.returncode or 0, out, err)


CLIENT = """#!{python} -ISB
import os, socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect({address!r})
words = [*{words!r}, *sys.argv[1:]]
client.sendall(repr((os.getpid(), words, os.getcwd(), dict(os.environ))).encode())
client.shutdown(socket.SHUT_WR)
os._exit(int(client.recv(9)))
"""
"""Command that is run by the server, with the command's own input and output."""


@contextmanager
def forked_commands(folder: Path) -> Iterator[None]:
    """Write commands `python`, `toolkit`, `accelerate` and `torchrun` to `folder`, for the PATH of a shell.

    The commands run in forks, and so do processes that they start as `sys.executable`.
    """
    address = str(folder / "socket")
    launchers = {"accelerate": "accelerate.commands.accelerate_cli", "torchrun": "torch.distributed.run"}
    modules = {name: ["-m", module] for name, module in {"toolkit": "toolkit", **launchers}.items()}
    for name, words in {"python": [], **modules}.items():
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=address, words=words))
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        thread = threading.Thread(target=_serve, args=(server, str(folder / "python")))
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def _serve(server: socket.socket, python: str) -> None:
    """Serve commands in threads, because commands in a pipe wait for each other."""
    threads = []
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # after shutdown
            break
        threads.append(threading.Thread(target=_serve_one, args=(client, python)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _serve_one(client: socket.socket, python: str) -> None:
    with client, client.makefile("rb") as request:
        pid, words, cwd, environment = ast.literal_eval(request.read().decode())
        streams = [Path(f"/proc/{pid}/fd/{number}") for number in range(3)]
        program = fork_context.Process(target=_main, args=(words, environment, Path(cwd), streams, python))
        program.start()
        program.join()
        with suppress(BrokenPipeError):  # a launcher may have ended the client
            client.sendall(str((program.exitcode or 0) % 256).encode())


class Fork:
    """Fork of this process that calls `run`, with the methods of `subprocess.Popen` that launchers use."""

    def __init__(self, run: Callable[[], NoReturn]):
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                run()
            finally:
                os._exit(70)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        ends = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_rank(
    run: Callable[[Sequence[str], Mapping[str, str]], int],
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: IO[str] | int | None = None,
    stderr: IO[str] | int | None = None,
    start_new_session: bool = False,
) -> Fork:
    """Fork instead of `subprocess.Popen`; `run(words, environment)` returns the exit code."""

    def begin() -> NoReturn:
        for number, stream in enumerate((stdin, stdout, stderr)):
            if stream == subprocess.DEVNULL:
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            elif stream == subprocess.STDOUT:
                os.dup2(1, number)
            elif stream is not None:
                os.dup2(stream if isinstance(stream, int) else stream.fileno(), number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # new programs do not inherit handlers
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        logging.disable(logging.NOTSET)
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # keeps temporary folders
        os._exit(run(words, dict(os.environ) if env is None else env))

    fork = Fork(begin)
    if start_new_session:  # here, because the caller may signal the group before the fork runs
        os.setpgid(fork.pid, fork.pid)
    return fork


def fork_ranks(run: Callable[[Sequence[str], Mapping[str, str]], int]) -> None:
    """Replace the ranks and trial runs that this process starts with forks that call `run`."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    new_process = subprocess.Popen

    def start(args: Sequence[str], **options: Any) -> Any:
        # A recipe that another recipe starts without redirection must not inherit the state of the calling run.
        forks = args[0] == sys.executable and "stdout" in options
        return fork_rank(run, args[1:], **options) if forks else new_process(args, **options)

    subprocess_handler.Popen = subprocess.Popen = start  # type: ignore
    api.PContext.close.__defaults__ = (None, 1)  # timeout in seconds before ranks are killed


def _main(
    words: Sequence[str], environment: Mapping[str, str], cwd: Path, streams: Sequence[Path], python: str
) -> None:
    """Become `python *words`, in the fork."""
    sys.executable = python
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    fork_ranks(_run)
    os._exit(_run(words, environment))


def _run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `python *words` in this process and return the exit code."""
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv[:] = [sys.executable, *words]
    code = 0
    try:
        _run_words(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if not isinstance(stop.code, int | None):
            sys.stderr.write(f"{stop.code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _run_words(words: list[str]) -> Any:
    if words[0] == "-u":  # from torch's launcher
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        return runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    if words[0] == "-":
        words = ["-c", sys.stdin.read(), *words[1:]]
    if words[0] != "-c":
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        return runpy.run_path(words[0], run_name="__main__")
    sys.argv = ["-c", *words[2:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return exec(compile(words[1], "<string>", "exec"), vars(main))
