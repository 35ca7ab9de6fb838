"""Launchers of test processes: errors and hangs of ranks, and forks that replace new processes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.support.processes import program_environment, run_distributed
from tests.support.forked_python import forked_commands, run_forked
from toolkit.version import __version__


def fail_on_rank_one() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("rank one failed")
    dist.barrier()


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_run_distributed_with_a_failing_rank_raises_its_traceback():
    with pytest.raises(AssertionError, match=r"rank 1 of 2 raised:(.|\n)*rank one failed"):
        run_distributed(fail_on_rank_one, 2)


def test_run_distributed_with_a_hanging_rank_times_out():
    with pytest.raises(AssertionError, match=r"rank\(s\) \[0\] of 2 timed out"):
        run_distributed(hang_on_rank_zero, 2, timeout_s=5)


PROGRAM = """
import atexit, os, sys
from dataclasses import dataclass
@dataclass
class Config: ...
atexit.register(lambda: os.write(2, b"exit handler"))
print(__name__, Config.__module__, sys.argv, sys.orig_argv[1:], flush=True)
print(os.getcwd(), os.environ.get("WORD"), sys.stdin.read(), flush=True)
sys.exit({status})
"""


@pytest.mark.parametrize("status", ["'a reason'", "os.kill(os.getpid(), 15)"])
def test_run_forked_equals_a_new_process(status: str, tmp_path: Path):
    code, environment = PROGRAM.format(status=status), program_environment(WORD="value")
    (tmp_path / "program.py").write_text(code)
    for words in (["-c", code, "--flag"], [str(tmp_path / "program.py"), "--flag"]):
        command = [sys.executable, *words]
        new = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        forked = run_forked(*words, env=environment, cwd=tmp_path)
        assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)


def test_shell_runs_forked_commands_in_pipes(tmp_path: Path):
    script = f"PATH={tmp_path}:$PATH; (sleep 1; python -c 'print(6 * 7)') | python -c 'print(input())';"
    script += "toolkit --version;"
    script += "python - x <<< 'import sys; print(sys.argv[1:])'; python -c 'raise SystemExit(5)'"
    with forked_commands(tmp_path):
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=program_environment())
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout.splitlines() == ["42", __version__, "['x']"]
