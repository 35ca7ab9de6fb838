"""Start, exit codes, signals and restarts of the ranks of `--num-processes`."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.run.launch.launched import environment
from tests.support.forked_python import ForkedPython

TOY = '''
"""A recipe that evaluates lines."""
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

class StoppedWhileReported(RuntimeError):
    def __str__(self):
        os.kill(os.getpid(), 15)
        return "not reached"

if __name__ == "__main__":
    tk.run_recipe(main, {"full": full}, __doc__)
'''
OUT_OF_MEMORY = "error: out of memory: use more processes, or a smaller model.\n"
STOPPED = "stopped by SIGTERM outside training: run the same command again.\n"
INHERITED = "error: TOOLKIT_LAUNCH: is set, but the launcher did not start this process. Unset it, or start the "
INHERITED += "process with env=tk.without_launcher(os.environ).\nerror: rank 0 of 2 exited with code 2.\n"
KILLED = "rank 1 of 2 was ended by SIGKILL (by the system, if memory ran out)."


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def toy_words(toy, *lines, num_processes=2, flags=()):
    """Return the command line that evaluates `lines` on all ranks, or on one rank, as in "1:line"."""
    words = [str(toy), "--cpu", "--batch-size", "60", *flags]
    return [*words, "--num-processes", str(num_processes), "--lines", "0:0", *lines]


def start(toy, *lines, **settings):
    return ForkedPython(*toy_words(toy, *lines, **settings), cwd=toy.parent, env=environment())


def outcome(toy, *lines, **settings):
    """Return the exit code and stderr."""
    process = start(toy, *lines, **settings)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def rank_facts(toy, rank):
    """Return the facts that a rank writes when it starts."""
    path = toy.parent / f"rank{rank}.json"
    assert wait_until(path.exists), f"rank {rank} did not start"
    return json.loads(path.read_text())


def rank_pids(toy):
    return [rank_facts(toy, rank)["pid"] for rank in range(2)]


def have_ended(pids):
    def is_running(pid):
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    return wait_until(lambda: not any(map(is_running, pids)))


def test_start_processes_in_new_process_sets_rank_variables(toy):
    command = [sys.executable, *toy_words(toy)]
    done = subprocess.run(command, cwd=toy.parent, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    ranks = [rank_facts(toy, rank) for rank in range(2)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU")
    assert [[r[name] for name in names] for r in ranks] == [[str(rank), str(rank), "2", "2", "true"] for rank in (0, 1)]
    assert all(int(r["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2) for r in ranks)
    assert ranks[0]["argv"] == ranks[1]["argv"]


def test_ranks_of_one_machine_listen_on_loopback_only(toy):
    """torch's stores listen on all interfaces. A second run in the same processes makes a new process group."""
    assert outcome(toy, "listen(config)", flags=("--tracker", "none")) == (0, "")
    for rank in range(2):
        listening = toy.parent.joinpath(f"listens{rank}").read_text()
        assert "0.0.0.0" not in listening
        assert "'::'" not in listening


@pytest.mark.parametrize(
    ("lines", "processes", "code", "message"),
    [
        (["fail(tk.UserError('no good.'))"], 2, 2, "error: no good.\n"),
        (["1:fail(tk.UserError('no good here.'))", "time.sleep(60)"], 2, 2, "error: no good here.\n"),
        (["1:time.sleep(1)", "1:pathlib.Path('late').touch()"], 2, 0, ""),
        (["__import__('torch').empty(2**50)"], 1, 2, OUT_OF_MEMORY),
        (["1:os._exit(3)", "time.sleep(60)"], 2, 3, "error: rank 1 of 2 exited with code 3.\n"),
        (["0:sys.exit(__import__('subprocess').call([sys.executable, sys.argv[0]]))"], 2, 2, INHERITED),
        (["stop_while_reading()"], 2, 75, STOPPED),
        (["fail(StoppedWhileReported())"], 2, 75, STOPPED),
    ],
)
def test_exit_of_ranks_gives_one_message_and_exit_code(toy, lines, processes, code, message):
    assert outcome(toy, *lines, num_processes=processes) == (code, message)
    assert have_ended([json.loads(path.read_text())["pid"] for path in toy.parent.glob("rank*.json")])
    assert ("late" in str(lines)) == (toy.parent / "late").exists()


def test_error_of_launcher_is_reported(toy):
    toy.write_text(f"from toolkit.run.launch import agent\nagent._pass_on = lambda *_: open('missing')\n{TOY}")
    assert outcome(toy) == (2, "error: missing: No such file or directory.\n")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (9, f"error: {KILLED}\n"),
        (19, "error: another process did not answer within --process-timeout: it hangs or is gone.\n"),
    ],
)
def test_killed_or_stopped_rank_ends_run_without_traceback(toy, number, message):
    limit = ("--tracker", "none", "--run-dir", "run", "--process-timeout", "0.1")
    assert outcome(toy, f"wait_for_rank_1(config, {number})", flags=limit) == (1, message)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_while_ranks_import_gives_one_message(toy, number, code):
    importing = "import os, pathlib, time\nif rank := os.environ.get('RANK'):\n"
    importing += "    pathlib.Path(f'importing{rank}').touch()\n    time.sleep(1)\n"
    toy.write_text(importing + TOY)
    process = start(toy, "time.sleep(60)")
    assert wait_until(lambda: len(list(toy.parent.glob("importing*"))) == 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n")) == (code, 1)
    assert err.startswith("stopped by ")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_signal_reaches_every_rank(toy, number, code):
    process = start(toy, "time.sleep(60)")
    pids = rank_pids(toy)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert have_ended(pids)
    if number != signal.SIGKILL:
        assert err.startswith("stopped by ")
        assert err.count("\n") == 1


def test_sighup_under_nohup_is_ignored(toy):
    lines = ["os.kill(os.getpid(), 1)", "pathlib.Path('done').touch()"]
    command = ["nohup", sys.executable, toy, "--lines", *lines]
    done = subprocess.run(command, cwd=toy.parent, env=environment(), capture_output=True, timeout=60)
    assert done.returncode == 0
    assert (toy.parent / "done").exists()


def test_second_ctrl_c_kills_ranks_and_shows_cursor(toy):
    terminal, end = pty.openpty()
    words = toy_words(toy, "begin_run()", "wait_for_ctrl_c(rank)")
    process = ForkedPython(*words, cwd=toy.parent, env=environment(), output=Path(os.ttyname(end)))
    for name in ("waits", "heard"):
        assert wait_until(lambda name=name: len(list(toy.parent.glob(f"{name}*"))) == 2)
        process.send_signal(signal.SIGINT)
    assert wait_until(lambda: process.poll() is not None)
    assert process.returncode == 130
    shown = os.read(terminal, 4096).decode()
    command = shlex.join([sys.executable, *words])
    more = f"steps since the last checkpoint are lost; run `{command} --run-dir here` to continue"
    assert shown == f"\x1b[?25hstopped by Ctrl-C: {more}.\r\n"
    assert have_ended(rank_pids(toy))


ATTEMPT = "0:pathlib.Path(f'attempt{len(list(pathlib.Path().glob(\"attempt*\")))}').touch()"


def attempts(toy, *lines, num_processes=1):
    """Return the exit code, the lines of stderr and the number of starts of rank 0."""
    code, err = outcome(toy, ATTEMPT, *lines, num_processes=num_processes, flags=("--max-restarts", "2"))
    return code, err.splitlines(), len(list(toy.parent.glob("attempt*")))


def test_killed_rank_restarts_all_ranks_with_reason_and_folder(toy):
    kill = "1:'TOOLKIT_RESTARTED' in os.environ or os.kill(os.getpid(), 9)"
    result = attempts(toy, "0:begin_run()", "time.sleep(0.5)", kill, num_processes=2)
    assert result == (0, [f"error: {KILLED}", f"restart 1 of 2: {KILLED}"], 2)
    assert json.loads(rank_facts(toy, 0)["TOOLKIT_RESTARTED"]) == {"folder": "here", "reasons": [KILLED]}


def test_killed_rank_of_finished_run_is_not_restarted(toy):
    lines = ["0:begin_run('results.json')", "time.sleep(0.5)", "1:os.kill(os.getpid(), 9)"]
    message = "the run in here is finished, so it is not restarted."
    assert attempts(toy, *lines, num_processes=2) == (0, [f"error: {KILLED}", message], 1)


def test_bug_restarts_max_restarts_times(toy):
    code, err, count = attempts(toy, "fail(RuntimeError('boom'))", num_processes=2)
    assert (code, count) == (1, 3)
    assert sum("Traceback" in line for line in err) == 3, "one for all ranks of each attempt"
    restarts = [line for line in err if line.startswith("restart")]
    assert restarts == [f"restart {number} of 2: RuntimeError: boom" for number in (1, 2)]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("fail(tk.UserError('no good.'))", 2),
        ("fail(Preempted('stopped.'))", 75),
        ("fail(KeyboardInterrupt())", 130),
        ("fail(MemoryError())", 2),
    ],
)
def test_bad_input_and_stops_are_not_restarted(line, code, toy):
    result, err, count = attempts(toy, line)
    assert (result, count, len(err)) == (code, 1, 1)
