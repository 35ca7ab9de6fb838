"""Files in launch/ for SkyPilot, Kubernetes and Docker, compared with the flags of recipes."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from typing import Any

import yaml

from tests.support.helpers import ROOT
from toolkit.run.recipe_script import load_recipe

LAUNCH = ROOT / "launch"


def read(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def check_recipe(words: list[str]) -> None:
    """Raise UserError unless `words` are a recipe of this repository, and flags that it takes."""
    load_recipe(ROOT / words[0], words[1:])


def test_skypilot_command_parses_and_sets_all_variables():
    task = read("skypilot.yaml")
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_NODE_RANK": "1"}
    given |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", **task["envs"], "STORAGE": "s3://bucket/run"}
    script = task["run"].replace(".venv/bin/torchrun", "printf '%s\\n'")
    done = subprocess.run(["bash", "-euc", script], env=given, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    start = words.index("recipes/mnist_moe.py")
    assert words[:start] == shlex.split(
        "--nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500"
    )
    check_recipe(words[start:])
    assert set(re.findall(r"\.\[(\w+)\]", task["setup"])) <= extras()


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


# --- Docker ----------------------------------------------------------------------------------------------------------


def extras() -> set[str]:
    return {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile."""
    text = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]
