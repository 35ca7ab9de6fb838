"""sbatch templates without Slurm. `make test-slurm` submits them."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.support.processes import ROOT

TEMPLATES = sorted((ROOT / "slurm").glob("*.sbatch"))
each_template = pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)


@each_template
def test_template_has_valid_syntax_and_directives(path: Path):
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    directives = re.findall(r"^#SBATCH (--[\w-]+)", text, re.MULTILINE)
    assert {"--requeue", "--open-mode", "--signal", "--output"} <= set(directives)
    # Slurm reads directives before the first command only.
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert text.rindex("#SBATCH") < text.index(f"\n{commands[0]}")
    assert commands[0].startswith("trap 'stopped=1' USR1 TERM")
    assert "/home/" not in text


@each_template
def test_template_outside_slurm_names_sbatch(path: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(["bash", path, "recipe.py"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "submit this with sbatch" in done.stderr


SAVE_AND_EXIT = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved by", signal.Signals(number).name, flush=True)
    sys.exit({code})
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
time.sleep(30)
"""


def run_job(folder: Path, program: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in bash as job 7, with `program` as run.py, and a scontrol that prints its arguments."""
    (folder / "run.py").write_text(program)
    (folder / "scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n')
    (folder / "scontrol").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", "-uc", script.format(root=ROOT, run=f"run_and_requeue python3 {folder}/run.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=25)


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (1, False)])
def test_signal_reaches_the_run_and_only_a_saved_run_is_requeued(code, requeued, tmp_path):
    script = ". {root}/slurm/common.sh; (sleep 1; kill -USR1 $$) & {run}"
    done = run_job(tmp_path, SAVE_AND_EXIT.format(code=code), script)
    assert "saved by SIGUSR1" in done.stdout, done.stderr
    assert (done.returncode, "scontrol requeue 7" in done.stdout) == (code, requeued)


@pytest.mark.parametrize(
    "script",
    ["kill -USR1 $$; . {root}/slurm/common.sh; {run}", ". {root}/slurm/common.sh; (sleep 1; kill -USR1 $$) & {run}"],
    ids=["before common.sh", "before the run has a handler"],
)
def test_signal_before_the_run_begins_requeues_the_job(script, tmp_path):
    (trap,) = {line for path in TEMPLATES for line in path.read_text().splitlines() if line.startswith("trap")}
    done = run_job(tmp_path, "import time; time.sleep(30)", f"{trap}\n{script}")
    assert done.returncode == 75, done.stderr
    assert "scontrol requeue 7" in done.stdout
