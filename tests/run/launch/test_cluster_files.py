"""Files in launch/ for SkyPilot, Kubernetes and Docker, and sbatch templates, which `make test-slurm` submits."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from benchmarks.support.processes import ROOT
from toolkit.run.recipe_script import load_recipe


def read(name):
    return yaml.safe_load((ROOT / "launch" / name).read_text())


def check_recipe(words):
    """Raise UserError unless `words` are a recipe of this repository and valid flags."""
    load_recipe(ROOT / words[0], words[1:])


def test_skypilot_command_parses_and_sets_all_variables():
    task = read("skypilot.yaml")
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_NODE_RANK": "1"}
    given |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", **task["envs"], "STORAGE": "s3://bucket/run"}
    script = task["run"].replace(".venv/bin/torchrun", "printf '%s\\n'")
    done = subprocess.run(["bash", "-euc", script], env=given, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    start = words.index("recipes/mnist_moe.py")
    torchrun = "--nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500"
    assert words[:start] == shlex.split(torchrun)
    check_recipe(words[start:])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[(\w+)\]", task["setup"])) <= extras.keys()


def test_jobset_pods_are_ranks_of_one_world():
    jobset = read("jobset.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    check_recipe(container["args"])
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert int(variables["WORLD_SIZE"]) == job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['spec']['network']['subdomain']}"
    assert variables["MASTER_ADDR"] == first
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["args"][container["args"].index("--run-dir") + 1].startswith("/runs/")
    assert [rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"]] == [container["name"]]


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
import os, signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved by", signal.Signals(number).name, flush=True)
    sys.exit({code})
signal.signal(signal.SIGUSR1, save)
os.kill(os.getppid(), signal.SIGUSR1)  # as Slurm signals the script, once a handler is there
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
    done = run_job(tmp_path, SAVE_AND_EXIT.format(code=code), ". {root}/slurm/common.sh; {run}")
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
