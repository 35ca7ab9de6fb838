"""Files in launch/ for SkyPilot, Kubernetes and Docker, compared with the flags of recipes."""

import re
import shlex
import subprocess
import tomllib

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
