"""Launching ranks with `--num-processes`, passing signals on to them, and restarting them after a crash."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.run.launch.launched import environment
from tests.support.forked_python import ForkedPython

TOY = '''
"""A recipe that does what it is told."""
import json, os, pathlib, sys, time
import toolkit as tk
from toolkit.errors import Preempted

class Config(tk.RunConfig):
    lines: tuple[str, ...] = ()

def full() -> Config:
    """The only one."""
    return Config()

def main(config):
    rank = int(os.environ.get("RANK", "0"))
    facts = pathlib.Path(f"rank{rank}.written")
    facts.write_text(json.dumps({"pid": os.getpid(), "argv": sys.argv, **os.environ}))
    facts.replace(f"rank{rank}.json")
    for line in config.lines:
        only, _, line = line.rpartition(":")
        if not only or int(only) == rank:
            eval(line)

def fail(error):
    raise error

def wait_for_rank_1(config, number):
    from toolkit.run.run import start_run
    with start_run("toy", config):
        import torch, torch.distributed as dist
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(1))

def listen(config):
    from toolkit.run.run import start_run
    for number in range(2):
        with start_run("toy", config.replace(run_dir=pathlib.Path(f"run{number}"))):
            import psutil, torch.distributed as dist
            dist.barrier()
            processes = (psutil.Process(), psutil.Process().parent())
            listening = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
            pathlib.Path(f"listens{dist.get_rank()}").write_text(str(listening))

def begin_run(*files):
    from toolkit.run.launch.restarts import tell_folder
    folder = pathlib.Path("here")
    folder.mkdir(exist_ok=True)
    for name in files:
        (folder / name).touch()
    tell_folder(folder)

def wait_for_ctrl_c(rank):
    import signal
    signal.signal(signal.SIGINT, lambda *_: pathlib.Path(f"heard{rank}").touch())
    pathlib.Path(f"waits{rank}").touch()
    while True:
        time.sleep(0.1)

def stop_while_reading():
    try:
        os.kill(os.getpid(), 15)
    except Exception:
        pass

if __name__ == "__main__":
    tk.run_recipe(main, {"full": full}, __doc__)
'''
KILLED = "rank 1 of 2 was ended by SIGKILL (by the system, if memory ran out)."


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def toy_words(toy: Path, *lines: str, num_processes: int = 2, flags: Sequence[str] = ()) -> list[str]:
    """The toy on several processes: all of them run `lines`, or one rank does, as in "1:line"."""
    words = [str(toy), "--cpu", "--batch-size", "60", *flags]
    return [*words, "--num-processes", str(num_processes), "--lines", "0:0", *lines]


def start_new(toy: Path, *lines: str, num_processes: int = 2) -> subprocess.Popen[str]:
    """In new processes, where their start is the subject."""
    command = [sys.executable, *toy_words(toy, *lines, num_processes=num_processes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=toy.parent, env=environment(), **pipes)


def start(toy: Path, *lines: str, num_processes: int = 2, flags: Sequence[str] = ()) -> ForkedPython:
    words = toy_words(toy, *lines, num_processes=num_processes, flags=flags)
    return ForkedPython(*words, cwd=toy.parent, env=environment())


def outcome(toy: Path, *lines: str, num_processes: int = 2, flags: Sequence[str] = ()) -> tuple[int, str]:
    process = start(toy, *lines, num_processes=num_processes, flags=flags)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def rank_facts(toy: Path, rank: int, timeout_s: float = 60) -> dict:
    """What a rank wrote about itself, as soon as it has."""
    path = toy.parent / f"rank{rank}.json"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists():
            return json.loads(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} did not start")


def have_ended(pids: Sequence[int], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- one world ----------------------------------------------------------------------------------------------------


def test_start_processes_gives_each_rank_its_place(toy: Path):
    process = start_new(toy, num_processes=3)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    ranks = [rank_facts(toy, rank) for rank in range(3)]
    assert [(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"], r["LOCAL_WORLD_SIZE"]) for r in ranks] == [
        (str(rank), str(rank), "3", "3") for rank in range(3)
    ]
    assert {r["ACCELERATE_USE_CPU"] for r in ranks} == {"true"}
    assert all(int(r["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3) for r in ranks)
    assert len({tuple(r["argv"]) for r in ranks}) == 1


def test_ranks_of_one_machine_listen_on_loopback_only(toy: Path):
    """torch's stores listen on all interfaces. A second run of the same processes makes a new process group."""
    assert outcome(toy, "listen(config)", flags=("--tracker", "none")) == (0, "")
    for rank in range(2):
        listening = toy.parent.joinpath(f"listens{rank}").read_text()
        assert "0.0.0.0" not in listening
        assert "'::'" not in listening


# --- how it ends --------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = "error: out of memory: use more processes, or a smaller model.\n"


@pytest.mark.parametrize(
    ("lines", "processes", "code", "said"),
    [
        (["fail(tk.UserError('no good.'))"], 2, 2, "error: no good.\n"),
        (["1:fail(tk.UserError('no good here.'))", "time.sleep(60)"], 2, 2, "error: no good here.\n"),
        (["fail(Preempted('stopped at step 3.'))"], 2, 75, "stopped at step 3.\n"),
        (["1:time.sleep(1)", "1:pathlib.Path('late').touch()"], 2, 0, ""),
        (["__import__('torch').empty(2**50)"], 1, 2, OUT_OF_MEMORY),
        (["1:os._exit(3)"], 2, 3, "error: rank 1 of 2 exited with code 3.\n"),
        (["stop_while_reading()"], 2, 75, "stopped by SIGTERM outside training: run the same command again.\n"),
    ],
)
def test_ranks_that_end_give_one_line_and_exit_code(toy: Path, lines: list[str], processes: int, code: int, said: str):
    assert outcome(toy, *lines, num_processes=processes) == (code, said)
    assert have_ended([json.loads(path.read_text())["pid"] for path in toy.parent.glob("rank*.json")])
    assert ("late" in str(lines)) == (toy.parent / "late").exists()


def test_bug_on_all_ranks_shows_one_traceback(toy: Path):
    code, err = outcome(toy, "fail(RuntimeError('boom'))")
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.endswith("RuntimeError: boom\n")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (9, f"error: {KILLED}\n"),
        (19, "error: another process did not answer within --process-timeout: it hangs or is gone.\n"),
    ],
)
def test_rank_that_is_killed_or_stopped_ends_run_without_traceback(number: int, said: str, toy: Path):
    limit = ("--tracker", "none", "--run-dir", "run", "--process-timeout", "0.1")
    assert outcome(toy, f"wait_for_rank_1(config, {number})", flags=limit) == (1, said)


def test_no_rank_outlives_killed_launcher(toy: Path):
    process = start_new(toy, "time.sleep(60)")
    pids = [rank_facts(toy, rank)["pid"] for rank in range(2)]
    process.kill()
    process.communicate(timeout=60)
    assert have_ended(pids)


# --- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_while_ranks_import_gives_one_line(number: signal.Signals, code: int, toy: Path):
    importing = "import pathlib, os, time\nif rank := os.environ.get('RANK'):\n"
    importing += "    pathlib.Path(f'importing{rank}').touch()\n    time.sleep(1)\n"
    toy.write_text(importing + TOY)
    process = start_new(toy, "time.sleep(60)")
    while len(list(toy.parent.glob("importing*"))) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n")) == (code, 1)
    assert err.startswith("stopped by ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_signal_reaches_every_rank(number: signal.Signals, code: int, toy: Path):
    process = start(toy, "time.sleep(60)")
    pids = [rank_facts(toy, rank)["pid"] for rank in range(2)]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.startswith("stopped by ")
    assert err.count("\n") == 1
    assert have_ended(pids)


def test_hangup_under_nohup_is_ignored(toy: Path):
    process = subprocess.Popen(
        ["nohup", sys.executable, toy, "--lines", "os.kill(os.getpid(), 1)", "pathlib.Path('done').touch()"],
        cwd=toy.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert (toy.parent / "done").exists()


def test_second_ctrl_c_kills_ranks_and_shows_cursor(toy: Path):
    terminal, end = pty.openpty()
    words = toy_words(toy, "begin_run()", "wait_for_ctrl_c(rank)")
    process = ForkedPython(*words, cwd=toy.parent, env=environment(), output=Path(os.ttyname(end)))
    for heard in ("waits", "heard"):
        while len(list(toy.parent.glob(f"{heard}*"))) < 2 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    while process.poll() is None:
        time.sleep(0.02)
    assert process.returncode == 130
    shown = os.read(terminal, 4096).decode()
    command = shlex.join([sys.executable, *words])
    more = f"steps since the last checkpoint are lost; run `{command} --run-dir here` to continue"
    assert shown == f"\x1b[?25hstopped by Ctrl-C: {more}.\r\n"
    assert have_ended([rank_facts(toy, rank)["pid"] for rank in range(2)])


# --- restarts -----------------------------------------------------------------------------------------------------

RESTARTS = ("--max-restarts", "2")
ATTEMPT = "0:pathlib.Path(f'attempt{len(list(pathlib.Path().glob(\"attempt*\")))}').touch()"


def attempts(toy: Path, *lines: str, num_processes: int = 1) -> tuple[int, list[str], int]:
    """Exit code, lines on stderr, and how often rank 0 was started, where all run `lines`."""
    code, err = outcome(toy, ATTEMPT, *lines, num_processes=num_processes, flags=RESTARTS)
    return code, err.splitlines(), len(list(toy.parent.glob("attempt*")))


def test_killed_rank_restarts_all_ranks_with_reason_and_folder(toy: Path):
    kill = "1:'TOOLKIT_RESTARTED' in os.environ or os.kill(os.getpid(), 9)"
    code, err, count = attempts(toy, "0:begin_run()", "time.sleep(0.5)", kill, num_processes=2)
    assert (code, err, count) == (0, [f"error: {KILLED}", f"restart 1 of 2: {KILLED}"], 2)
    assert json.loads(rank_facts(toy, 0)["TOOLKIT_RESTARTED"]) == {"folder": "here", "reasons": [KILLED]}


def test_killed_rank_of_finished_run_restarts_nothing(toy: Path):
    lines = ["0:begin_run('results.json')", "time.sleep(0.5)", "1:os.kill(os.getpid(), 9)"]
    code, err, count = attempts(toy, *lines, num_processes=2)
    assert err == [f"error: {KILLED}", "the run in here is finished, so it is not restarted."]
    assert (code, count) == (0, 1)


def test_bug_restarts_max_restarts_times(toy: Path):
    code, err, count = attempts(toy, "fail(RuntimeError('boom'))")
    assert (code, count) == (1, 3)
    assert [line for line in err if line.startswith("restart")] == [
        "restart 1 of 2: RuntimeError: boom",
        "restart 2 of 2: RuntimeError: boom",
    ]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("fail(tk.UserError('no good.'))", 2),
        ("fail(Preempted('stopped.'))", 75),
        ("fail(KeyboardInterrupt())", 130),
        ("fail(MemoryError())", 2),
    ],
)
def test_bad_input_and_stops_restart_nothing(line: str, code: int, toy: Path):
    left, err, count = attempts(toy, line)
    assert (left, count, len(err)) == (code, 1, 1)
