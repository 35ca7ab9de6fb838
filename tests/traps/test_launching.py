"""What `accelerate launch` starts in place of what was asked, and what becomes of exit codes; and what ours does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

# One write per line: ranks share their output, and a print is two writes where nothing buffers it.
PLAIN = """
import os
from accelerate import Accelerator
accelerator = Accelerator()
os.write(1, f"world {accelerator.num_processes} rank {accelerator.process_index}\\n".encode())
"""

OURS = '''
"""Says what world it is in."""
import os
from dataclasses import dataclass
import toolkit as tk

class Config(tk.RunConfig):
    pass

def full() -> Config:
    """The only one."""
    return Config(cpu=False, tracker="none")

def main(config):
    if config.seed == 13:
        raise tk.UserError("--seed 13: take a luckier number.")
    with tk.start_run("worlds", config) as run:
        os.write(1, f"world {run.world_size} rank {run.rank}\\n".encode())

if __name__ == "__main__":
    tk.run_recipe(main, {"full": full}, __doc__)
'''

UNLUCKY = """
import sys
sys.stderr.write("--seed 13: take a luckier number.\\n")
sys.exit(2)
"""

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
LAUNCHER_VARIABLES = ("ACCELERATE_", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_", "TOOLKIT_", "WANDB_")


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    for name, text in {"plain": PLAIN, "ours": OURS, "unlucky": UNLUCKY}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    clean |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=clean | variables, capture_output=True, text=True, timeout=180)


def worlds(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(line for line in done.stdout.splitlines() if line.startswith("world "))


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def test_fact_7_two_cpu_processes_become_one_and_ours_refuses(scripts: Path):
    asked = [*LAUNCH, "--cpu", "--num_processes", "2"]
    plain = run(scripts, *asked, "plain.py")
    assert (plain.returncode, worlds(plain)) == (0, ["world 1 rank 0"])

    ours = run(scripts, *asked, "ours.py")
    assert ours.returncode != 0
    assert worlds(ours) == []
    (error,) = errors(ours)
    assert "2 processes were requested, and one was started" in error


def test_fact_7_a_gpu_config_with_use_cpu_makes_two_solo_runs_and_ours_makes_one_world(scripts: Path):
    config = scripts / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nuse_cpu: true\nnum_machines: 1\n"
        "num_processes: 2\nmixed_precision: 'no'\nmain_process_port: 0\nsame_network: true\n"
    )
    asked = [*LAUNCH, "--config_file", str(config)]
    plain = run(scripts, *asked, "plain.py")
    assert (plain.returncode, worlds(plain)) == (0, ["world 1 rank 0", "world 1 rank 0"])

    ours = run(scripts, *asked, "ours.py", "--run-dir", "run")
    assert (ours.returncode, worlds(ours)) == (0, ["world 2 rank 0", "world 2 rank 1"]), ours.stderr


def test_fact_12_launchers_turn_exit_code_2_into_1_and_many_lines_and_ours_keeps_both(scripts: Path):
    asked = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    plain = run(
        scripts, *LAUNCH, *asked, "--dynamo_backend", "no", "--main_process_port", "0", "unlucky.py",
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    assert plain.returncode == 1
    assert len(plain.stderr.splitlines()) > 5

    ours = run(scripts, sys.executable, "ours.py", "--cpu", "--num-processes", "2", "--seed", "13")
    assert (ours.returncode, ours.stderr) == (2, "error: --seed 13: take a luckier number.\n")
