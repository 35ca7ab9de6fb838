"""Launch traps: `accelerate launch` starts other worlds than requested, and changes exit codes."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.run.launch.launched import environment
from tests.support.forked_python import forked_commands

# One write per line, because ranks share the output.
PLAIN = """
import os
from accelerate import Accelerator
accelerator = Accelerator()
os.write(1, f"world {accelerator.num_processes} rank {accelerator.process_index}\\n".encode())
"""

RECIPE = '''
"""Print the world."""
import os
import toolkit as tk

class Config(tk.RunConfig):
    pass

def full() -> Config:
    """The preset."""
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

Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Function that runs a command in the folder of the scripts, and returns exit code, worlds and stderr."""
    for name, text in {"plain": PLAIN, "recipe": RECIPE, "unlucky": UNLUCKY}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "bin").mkdir()

    def run_command(command: str, **variables: str) -> tuple[int, list[str], str]:
        words = [str(tmp_path / "bin" / command.split()[0]), *command.split()[1:]]
        clean = environment(OMP_NUM_THREADS="1", PATH=f"{tmp_path}/bin:{os.environ['PATH']}", **variables)
        done = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=180)
        return done.returncode, sorted(w for w in done.stdout.splitlines() if w.startswith("world ")), done.stderr

    with forked_commands(tmp_path / "bin"):
        yield run_command


def test_gpu_config_with_use_cpu_starts_two_worlds_of_one(run: Run, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nuse_cpu: true\nnum_machines: 1\n"
        "num_processes: 2\nmixed_precision: 'no'\nmain_process_port: 0\nsame_network: true\n"
    )
    launch = "accelerate launch --config_file config.yaml"
    assert run(f"{launch} plain.py")[:2] == (0, ["world 1 rank 0", "world 1 rank 0"])
    code, worlds, stderr = run(f"{launch} recipe.py --run-dir run")
    assert (code, worlds) == (0, ["world 2 rank 0", "world 2 rank 1"]), stderr


def test_accelerate_launch_turns_exit_code_2_into_1_and_adds_lines(run: Run):
    launch = "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    options = "--dynamo_backend no --main_process_port 0"
    code, _, stderr = run(f"{launch} {options} unlucky.py", ACCELERATE_USE_CPU="true")
    assert code == 1
    assert len(stderr.splitlines()) > 5
    code, _, stderr = run("python recipe.py --cpu --num-processes 2 --seed 13")
    assert (code, stderr) == (2, "error: --seed 13: take a luckier number.\n")
