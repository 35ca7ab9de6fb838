"""Starting ranks, passing on what happens to them, and refusing a world that is not what was asked for."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed import DistNetworkError, TCPStore

from tests.support.forked_python import ForkedPython, forked_commands, run_forked
from tests.support.helpers import ROOT, free_port
from toolkit.errors import EXIT_BUG, EXIT_PREEMPTED, UserError
from toolkit.run.config.run import RunConfig
from toolkit.run.launch import children, supervisor
from toolkit.run.launch import world as launch
from toolkit.run.launch.children import Children
from toolkit.run.launch.port import bound_port, reserve_port
from toolkit.run.launch.supervisor import must_start_processes

CONFIGS = ROOT / "accelerate_configs"
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch"]
LAUNCHER_VARIABLES = ("ACCELERATE_", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_", "OMP_", "TOOLKIT_", "WANDB_", "FSDP_")

TOY = '''
"""A recipe that does what it is told."""
import json, os, pathlib, sys, time
from dataclasses import dataclass
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

def wait_for_a_stopped_rank(config):
    import signal
    from toolkit.run.run import start_run
    with start_run("toy", config):
        from toolkit.experts.parallel.groups import make_expert_groups, sum_over_ranks
        import torch, torch.distributed as dist
        group = make_expert_groups(2).ep_group
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1), group=group)

def wait_for_a_killed_rank(config):
    import signal
    from toolkit.run.run import start_run
    with start_run("toy", config):
        import torch, torch.distributed as dist
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

def listen(config):
    from toolkit.run.run import start_run
    for number in range(2):
        with start_run("toy", config.replace(run_dir=pathlib.Path(f"run{number}"))):
            import psutil, torch.distributed as dist
            dist.barrier()
            listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
            pathlib.Path(f"listens{dist.get_rank()}").write_text(str(listening))

def begin_run():
    from toolkit.run.launch.restarts import FOLDER, send
    send(f"{FOLDER}here")

def finish_run():
    from toolkit.run.launch.restarts import FINISHED, FOLDER, send
    for begin in (FOLDER, FINISHED):
        send(f"{begin}here")

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


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    return clean | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | more


def toy_words(toy: Path, *lines: str, num_processes: int = 2, flags: Sequence[str] = ()) -> list[str]:
    """The toy on several processes: all of them run `lines`, or one rank does, as in "1:line"."""
    words = [str(toy), "--cpu", "--batch-size", "60", *flags]
    return [*words, "--num-processes", str(num_processes), "--lines", "0:0", *lines]


def start_new(toy: Path, *lines: str, num_processes: int = 2, flags: Sequence[str] = ()) -> subprocess.Popen[str]:
    """In new processes, where their start is the subject."""
    command = [sys.executable, *toy_words(toy, *lines, num_processes=num_processes, flags=flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=toy.parent, env=environment(), **pipes)


def start(toy: Path, *lines: str, num_processes: int = 2, flags: Sequence[str] = ()) -> ForkedPython:
    words = toy_words(toy, *lines, num_processes=num_processes, flags=flags)
    return ForkedPython(*words, cwd=toy.parent, env=environment())


def outcome(toy: Path, *lines: str, num_processes: int = 2) -> tuple[int, str]:
    process = start(toy, *lines, num_processes=num_processes)
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


def has_ended(pid: int, timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- starting and supervising ------------------------------------------------------------------------------------


def test_each_rank_learns_its_place_in_one_world(toy: Path):
    process = start_new(toy, num_processes=3)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    ranks = [rank_facts(toy, rank) for rank in range(3)]
    assert [(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"], r["LOCAL_WORLD_SIZE"]) for r in ranks] == [
        (str(rank), str(rank), "3", "3") for rank in range(3)
    ]
    assert len({(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks}) == 1
    assert {r["ACCELERATE_USE_CPU"] for r in ranks} == {"true"}
    assert all(int(r["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3) for r in ranks)
    assert len({tuple(r["argv"]) for r in ranks}) == 1


def test_a_reserved_port_is_given_to_nobody_but_lets_a_rank_listen():
    """It was only found to be free, and could be taken before the first rank listened."""
    with reserve_port() as reserved:
        port = int(bound_port(reserved))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
        store.set("rank", "0")
        assert store.get("rank") == b"0"


OUT_OF_MEMORY = "error: out of memory: use more processes, or a smaller model.\n"


@pytest.mark.parametrize(
    ("lines", "processes", "code", "said"),
    [
        (["fail(tk.UserError('no good.'))"], 2, 2, "error: no good.\n"),
        (["1:fail(tk.UserError('no good here.'))", "time.sleep(60)"], 2, 2, "error: no good here.\n"),
        (["fail(Preempted('stopped at step 3.'))"], 2, 75, "stopped at step 3.\n"),
        (["1:time.sleep(1)", "1:pathlib.Path('late').touch()"], 2, 0, ""),
        (["__import__('torch').empty(2**50)"], 1, 2, OUT_OF_MEMORY),
        (["bytearray(2**60)"], 2, 2, OUT_OF_MEMORY),
        (["stop_while_reading()"], 2, 75, "stopped by SIGTERM outside training: run the same command again.\n"),
    ],
)
def test_how_ranks_end_is_one_line_and_the_exit_code(toy: Path, lines: list[str], processes: int, code: int, said: str):
    assert outcome(toy, *lines, num_processes=processes) == (code, said)
    assert all(has_ended(rank_facts(toy, rank)["pid"]) for rank in range(processes))
    assert ("late" in str(lines)) == (toy.parent / "late").exists()


def test_ranks_of_one_machine_listen_to_no_other_one(toy: Path):
    """torch's store listened on all interfaces. A second run of the same processes meets anew."""
    process = start(toy, "listen(config)", flags=("--tracker", "none"))
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    for rank in range(2):
        listening = toy.parent.joinpath(f"listens{rank}").read_text()
        assert "0.0.0.0" not in listening
        assert "'::'" not in listening


def test_a_bug_shows_its_traceback_and_leaves_with_1(toy: Path):
    code, err = outcome(toy, "1:fail(RuntimeError('boom'))")
    assert code == 1
    assert err.count("Traceback") == 1
    assert "RuntimeError: boom" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_ranks_import_is_one_line(number: signal.Signals, code: int, toy: Path):
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


def test_a_hangup_that_nohup_had_ignored_stays_ignored(toy: Path):
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


@pytest.mark.parametrize("terminated", [False, True])
def test_a_rank_that_is_stopped_ends_the_run_within_the_timeout_and_is_named(terminated: bool, toy: Path):
    limit = ("--tracker", "none", "--run-dir", "run", "--process-timeout", "0.1")
    process = start(toy, "wait_for_a_stopped_rank(config)", flags=limit)
    if terminated:
        stopped = psutil.Process(rank_facts(toy, 1)["pid"])
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert "error: rank 1 of 2 was stopped (SIGSTOP) and did not end." in err.splitlines()
    assert "Traceback" not in err
    assert process.returncode == (75 if terminated else 1)


def test_a_rank_that_is_killed_is_named_and_those_that_waited_for_it_print_no_traceback(toy: Path):
    process = start(toy, "wait_for_a_killed_rank(config)", flags=("--tracker", "none", "--run-dir", "run"))
    _, err = process.communicate(timeout=60)
    assert "error: rank 1 of 2 was ended by SIGKILL (by the system, if memory ran out)." in err.splitlines()
    assert "Traceback" not in err
    assert process.returncode == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_reaches_every_rank(number: signal.Signals, code: int, toy: Path):
    process = start(toy, "time.sleep(60)")
    pids = [rank_facts(toy, rank)["pid"] for rank in range(2)]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.startswith("stopped by ")
    assert err.count("\n") == 1
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.parametrize("begins", ["0", "begin_run()"])
def test_a_second_ctrl_c_ends_all_ranks_at_once_and_shows_the_cursor_again(begins: str, toy: Path):
    """It was taken for the system's SIGKILL for lack of memory, with exit code 1."""
    terminal, end = pty.openpty()
    command = [sys.executable, *toy_words(toy, begins, "wait_for_ctrl_c(rank)")]
    process = subprocess.Popen(command, cwd=toy.parent, env=environment(), stdout=end, stderr=end)
    os.close(end)
    for heard in ("waits", "heard"):
        while len(list(toy.parent.glob(f"{heard}*"))) < 2 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    shown = os.read(terminal, 4096).decode()
    os.close(terminal)
    more = f": steps since the last checkpoint are lost; run `{shlex.join(command)} --run-dir here` to continue"
    assert shown == f"\x1b[?25hstopped by Ctrl-C{more if begins != '0' else ''}.\r\n"
    assert all(has_ended(rank_facts(toy, rank)["pid"]) for rank in range(2))


def test_no_rank_outlives_a_killed_parent(toy: Path):
    process = start_new(toy, "time.sleep(60)")
    pids = [rank_facts(toy, rank)["pid"] for rank in range(2)]
    process.kill()
    process.communicate(timeout=60)
    assert all(has_ended(pid) for pid in pids)


# --- starting again ----------------------------------------------------------------------------------------------

RESTARTS = ("--max-restarts", "2")
ATTEMPT = "pathlib.Path(f'attempt{len(list(pathlib.Path().glob(\"attempt*\")))}').touch()"


def attempts(toy: Path, line: str, num_processes: int = 1) -> tuple[int, list[str], int]:
    """Exit code, lines on stderr, and how often rank 0 was started, where all run `line`."""
    process = start(toy, "0:" + ATTEMPT, line, num_processes=num_processes, flags=RESTARTS)
    _, err = process.communicate(timeout=60)
    return process.returncode, err.splitlines(), len(list(toy.parent.glob("attempt*")))


def test_a_rank_that_is_killed_is_started_again_with_all_others(toy: Path):
    """Rank 1 kills itself in the first attempt, and the second one ends well and knows why it is there."""
    line = "1:'TOOLKIT_RESTARTED' in os.environ or os.kill(os.getpid(), 9)"
    code, err, count = attempts(toy, line, num_processes=2)
    killed = "rank 1 of 2 was ended by SIGKILL (by the system, if memory ran out)."
    assert (code, err, count) == (0, [f"error: {killed}", f"restart 1 of 2 in 1 s: {killed}"], 2)
    told = json.loads(rank_facts(toy, 0)["TOOLKIT_RESTARTED"])
    assert told == {"folder": None, "reasons": [killed]}


def test_a_run_that_was_finished_when_a_rank_was_killed_is_not_started_again(toy: Path):
    process = start(toy, "0:" + ATTEMPT, "0:finish_run()", "1:os.kill(os.getpid(), 9)", flags=RESTARTS)
    _, err = process.communicate(timeout=60)
    killed = "error: rank 1 of 2 was ended by SIGKILL (by the system, if memory ran out)."
    assert err.splitlines() == [killed, "the run in here is finished, so it is not started again."]
    assert (process.returncode, len(list(toy.parent.glob("attempt*")))) == (0, 1)


def test_a_bug_is_tried_as_often_as_was_asked_for_and_named(toy: Path):
    code, err, count = attempts(toy, "fail(RuntimeError('boom'))")
    assert (code, count) == (1, 3)
    assert [line for line in err if line.startswith("restart")] == [
        "restart 1 of 2 in 1 s: RuntimeError: boom",
        "restart 2 of 2 in 2 s: RuntimeError: boom",
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
def test_bad_input_and_stops_are_no_reason_to_start_again(line: str, code: int, toy: Path):
    left, err, count = attempts(toy, line)
    assert (left, count, len(err)) == (code, 1, 1)


def test_a_stop_before_the_next_attempt_is_kept(toy: Path):
    process = start_new(toy, "os.kill(os.getpid(), 9)", num_processes=1, flags=RESTARTS)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("restart"):
        assert process.poll() is None
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err.startswith("stopped by SIGTERM")


# --- the world that was asked for --------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    """Sets the environment of a rank, and the number of GPUs that torch finds."""

    def set_world(*, gpus: int = 0, **variables: str) -> None:
        for name in list(os.environ):
            if name.startswith(LAUNCHER_VARIABLES):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)

    return set_world


RANK_1_OF_2 = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "config", "says"),
    [
        ({"WORLD_SIZE": "two"}, {}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "2"}, {}, "RANK is not"),
        ({"LOCAL_RANK": "0"}, {}, "LOCAL_RANK=0 is set but WORLD_SIZE is not: use a launcher, or unset it"),
        (RANK_1_OF_2, {"num_processes": 4}, "num_processes=4: the launcher started 2"),
        (RANK_1_OF_2, {}, "asks for GPUs and this machine has none"),
        (RANK_1_OF_2 | {"ACCELERATE_USE_FSDP": "true"}, {"cpu": True}, "asks for FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "asks for DEEPSPEED"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, {}, "asks for GPUs"),
        (RANK_1_OF_2, {"cpu": True, "max_restarts": 3}, "max_restarts=3: the launcher must start"),
        (RANK_1_OF_2 | {"TORCHELASTIC_MAX_RESTARTS": "3"}, {"cpu": True}, "run_dir=None: the launcher may start"),
    ],
)
def test_a_wrong_world_is_refused(variables: dict[str, str], config: dict, says: str, world):
    world(**variables)
    with pytest.raises(UserError, match=says):
        launch.check_world(RunConfig(**config))


def test_more_processes_than_gpus_are_refused(world):
    world(gpus=1, **RANK_1_OF_2)
    with pytest.raises(UserError, match="2 processes asks for GPUs and this machine has only 1: add cpu=True"):
        launch.check_world(RunConfig(num_processes=2))


@pytest.mark.parametrize(
    ("gpus", "variables", "config"),
    [
        (0, {}, {}),
        (0, {}, {"num_processes": 2}),
        (0, {"LOCAL_RANK": "0"}, {"num_processes": 2}),
        (0, {"LOCAL_RANK": "-1"}, {}),
        (2, RANK_1_OF_2, {}),
        (2, RANK_1_OF_2, {"num_processes": 2}),
        (0, RANK_1_OF_2, {"cpu": True}),
        (0, RANK_1_OF_2 | {"ACCELERATE_USE_CPU": "true"}, {}),
    ],
)
def test_a_right_world_is_let_through(gpus: int, variables: dict[str, str], config: dict, world):
    world(gpus=gpus, **variables)
    launch.check_world(RunConfig(**config))


def test_ranks_started_here_take_the_cpu_where_there_is_no_gpu(world):
    world(**RANK_1_OF_2, TOOLKIT_REPORT_PIPE="3")
    launch.check_world(RunConfig(num_processes=2))
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_processes_are_started_once(world):
    world()
    assert must_start_processes(RunConfig(num_processes=2))
    assert not must_start_processes(RunConfig(num_processes=1))
    assert not must_start_processes(RunConfig())
    assert must_start_processes(RunConfig(max_restarts=1))
    world(TOOLKIT_REPORT_PIPE="3")
    assert not must_start_processes(RunConfig(max_restarts=1))
    world(**RANK_1_OF_2)
    assert not must_start_processes(RunConfig(num_processes=2))


# --- under Accelerate's launcher ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("commands")
    with forked_commands(folder):
        yield str(folder / "python")


def accelerate_launch(*words: str, cwd: Path, python: str) -> SimpleNamespace:
    """`accelerate launch`; what our own lines on stderr were, apart from all that the launcher adds."""
    done = run_forked(*ACCELERATE, *words, cwd=cwd, env=environment(), python=python)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return SimpleNamespace(code=done.returncode, errors=errors, out=done.stdout, err=done.stderr)


def test_a_count_for_the_recipe_is_not_taken_for_one_for_the_launcher(toy: Path, python: str):
    words = ["--cpu", "--num_processes", "1", str(toy), "--cpu", "--num-processes", "2"]
    done = accelerate_launch(*words, cwd=toy.parent, python=python)
    assert done.code == 0, done.err
    assert rank_facts(toy, 1)["WORLD_SIZE"] == "2"


def test_a_config_for_gpus_is_refused_in_one_line_without_them(toy: Path, python: str):
    words = ["--config_file", f"{CONFIGS}/ddp.yaml", "--num_processes", "2", str(toy)]
    done = accelerate_launch(*words, cwd=toy.parent, python=python)
    assert done.code != 0
    assert len(done.errors) == 1, done.err
    assert "asks for GPUs and this machine has none" in done.errors[0]


def train(config: str, *words: str, run_dir: Path) -> list[str]:
    recipe = [str(ROOT / "recipes" / "mnist_moe.py"), "debug", "--tracker", "none", "--max-steps", "3"]
    return ["--config_file", f"{CONFIGS}/{config}.yaml", *words, *recipe, "--run-dir", str(run_dir)]


def test_several_machines_make_one_world(tmp_path: Path, python: str):
    port = str(free_port())
    where = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    machines = [
        ForkedPython(
            *ACCELERATE,
            *train(
                *("multi_node", *where, "--main_process_port", port, "--machine_rank", str(rank)),
                run_dir=tmp_path / "run",
            ),
            "--cpu",
            cwd=tmp_path,
            env=environment(),
            python=python,
        )
        for rank in range(2)
    ]
    try:
        for machine in machines:
            _, err = machine.communicate(timeout=180)
            assert machine.returncode == 0, err
    finally:
        for machine in machines:
            machine.kill()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["world_size"] == 2


def test_a_first_process_that_does_not_answer_is_named():
    port = free_port()
    with pytest.raises(DistNetworkError) as nobody:
        TCPStore("127.0.0.1", port, world_size=2, is_master=False, timeout=timedelta(milliseconds=100))
    assert launch.lost_process(nobody.value) == (
        f"the first process did not answer at 127.0.0.1:{port} within --process-timeout: start it, or correct "
        "MASTER_ADDR and MASTER_PORT."
    )


@pytest.mark.parametrize(
    ("rank", "code", "says"),
    [
        (0, 2, "error: MASTER_PORT {port}: another program on this machine listens there: take another.\n"),
        (
            1,
            1,
            "error: the first process did not answer at 127.0.0.1:{port} within --process-timeout: start it, or "
            "correct MASTER_ADDR and MASTER_PORT.\n",
        ),
    ],
)
def test_a_port_that_another_program_has_is_one_line(rank: int, code: int, says: str, tmp_path: Path):
    """It accepts, and stays silent."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env = os.environ | world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        recipe = [str(ROOT / "recipes" / "mnist_moe.py"), "debug", "--cpu", "--run-dir", str(tmp_path / "run")]
        ended = run_forked(*recipe, "--process-timeout", "0.02", env=env)
    assert (ended.returncode, ended.stderr) == (code, says.format(port=port))


def test_every_config_is_one_that_accelerate_reads_and_the_readme_speaks_of():
    readme = (CONFIGS / "README.md").read_text()
    names = {path.name for path in CONFIGS.glob("*.yaml")}
    assert names == {"single.yaml", "ddp.yaml", "ddp_cpu.yaml", "fsdp2.yaml", "multi_node.yaml"}
    for name in names:
        load_config_from_file(str(CONFIGS / name))
        assert name in readme


@pytest.mark.parametrize(("has_folder", "seconds"), [(True, supervisor.PREEMPTED_GRACE_S), (False, children.GRACE_S)])
def test_ranks_are_given_time_to_save_once_the_run_has_a_folder(has_folder: bool, seconds: float):
    ended = Children()
    assert supervisor._grace_s({0: EXIT_PREEMPTED}, ended, has_folder) == seconds
    assert supervisor._grace_s({0: EXIT_BUG}, ended, has_folder) == children.GRACE_S
