"""What can be known of the sbatch templates without Slurm. `make test-slurm` submits them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

TEMPLATES = sorted((ROOT / "slurm").glob("*.sbatch"))


def test_there_are_templates_for_one_run_several_gpus_several_machines_and_arrays():
    assert [path.stem for path in TEMPLATES] == ["multi_gpu", "multi_node", "run", "sweep_array"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_valid_and_can_be_queued_anew(path: Path):
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    directives = re.findall(r"^#SBATCH (--[\w-]+)", text, re.MULTILINE)
    assert {"--requeue", "--open-mode", "--signal", "--output"} <= set(directives)
    # Slurm reads directives up to the first command only.
    first_command = re.search(r"^[^#\n]", text, re.MULTILINE)
    assert first_command is not None
    assert text.rindex("#SBATCH") < first_command.start()
    assert "/home/" not in text


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_that_was_not_submitted_says_so(path: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(["bash", path, "recipe.py"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "submit this with sbatch" in done.stderr


SAVES_AND_LEAVES = """
import signal, sys, time
def leave(number, frame):
    time.sleep(0.5)  # as long as a save takes
    print("saved by", signal.Signals(number).name, flush=True)
    sys.exit({code})
signal.signal(signal.SIGUSR1, leave)
print("ready", flush=True)
time.sleep(30)
"""


def run_job(script: str, folder: Path, *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `script` in bash as job 7, with a scontrol in `folder` that prints how it was called."""
    (folder / "scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n')
    (folder / "scontrol").chmod(0o755)
    return subprocess.run(
        ["bash", "-uc", script],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (1, False)])
def test_the_warning_reaches_the_run_and_only_a_saved_one_is_queued_anew(code, requeued, tmp_path):
    (tmp_path / "run.py").write_text(SAVES_AND_LEAVES.format(code=code))
    script = f". {ROOT}/slurm/common.sh; (sleep 1; kill -USR1 $$) & run_and_requeue python3 {tmp_path}/run.py"
    done = run_job(script, tmp_path, timeout=60)
    assert "saved by SIGUSR1" in done.stdout, done.stderr
    assert done.returncode == code
    assert ("scontrol requeue 7" in done.stdout) == requeued


@pytest.mark.parametrize("when", ["before the functions are known", "before the run can handle it"])
def test_a_warning_before_the_run_has_begun_queues_the_job_anew(when, tmp_path):
    (tmp_path / "run.py").write_text("import time; time.sleep(30)")  # without a handler
    (first_line,) = {line for path in TEMPLATES for line in path.read_text().splitlines() if line.startswith("trap")}
    signal_at_once, signal_later = ("kill -USR1 $$", ":") if when.endswith("known") else (":", "kill -USR1 $$")
    script = f"{first_line}\n{signal_at_once}; . {ROOT}/slurm/common.sh; (sleep 1; {signal_later}) & "
    script += f"run_and_requeue python3 {tmp_path}/run.py"
    done = run_job(script, tmp_path, timeout=20)
    assert done.returncode == 75, done.stderr
    assert "scontrol requeue 7" in done.stdout


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_trap_is_the_first_command_of_a_template(path: Path):
    first, *_ = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert first.startswith("trap 'stopped=1' USR1 TERM")
