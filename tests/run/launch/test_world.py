"""Checks of the launched world, and runs under other launchers."""

import json
import os

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from benchmarks.support.processes import ROOT, free_port
from tests.run.launch.launched import LAUNCHER_VARIABLES, RANK_1_OF_2, environment
from tests.support.forked_python import ForkedPython, run_forked
from toolkit.errors import UserError
from toolkit.run.config.run import RunConfig
from toolkit.run.launch.agent import must_start_processes
from toolkit.run.launch.world import check_world

CONFIGS = ROOT / "accelerate_configs"
RECIPE = [str(ROOT / "recipes" / "mnist_moe.py"), "debug", "--tracker", "none", "--max-steps", "3", "--cpu"]


@pytest.fixture
def world(monkeypatch):
    """Setter of a rank's environment and of the number of GPUs that torch finds."""

    def set_world(*, gpus=0, **variables):
        for name in list(os.environ):
            if name.startswith(LAUNCHER_VARIABLES):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)

    return set_world


@pytest.mark.parametrize(
    ("gpus", "variables", "config", "message"),
    [
        (0, RANK_1_OF_2, {"num_processes": 4}, "num_processes=4: the launcher started 2"),
        (1, RANK_1_OF_2, {"num_processes": 2}, "starts 2 processes, and this machine has only 1 GPUs"),
        (0, {"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "asks for DEEPSPEED"),
        (2, {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, {}, "each process would train by itself"),
        (0, RANK_1_OF_2, {"cpu": True, "max_restarts": 3}, "max_restarts=3: the launcher has to restart"),
        (0, RANK_1_OF_2 | {"TORCHELASTIC_MAX_RESTARTS": "3"}, {"cpu": True}, "run_dir=None: the launcher may restart"),
        (0, RANK_1_OF_2 | {"RANK": "2"}, {"cpu": True}, "RANK='2': the launcher has to set an integer from 0 to 1"),
        (0, RANK_1_OF_2 | {"MASTER_PORT": "x"}, {"cpu": True}, "MASTER_PORT='x': the launcher has to set an integer"),
        (0, {"WORLD_SIZE": "0"}, {"cpu": True}, "WORLD_SIZE='0': the launcher has to set an integer of 1 or more"),
        (1, RANK_1_OF_2 | {"LOCAL_WORLD_SIZE": "0"}, {}, "LOCAL_WORLD_SIZE='0': the launcher has to set an integer"),
        (0, {"RANK": "0", "WORLD_SIZE": "2"}, {"cpu": True}, "MASTER_ADDR: is not set"),
        (0, {"TOOLKIT_RESTARTED": "{}"}, {}, "TOOLKIT_RESTARTED: cannot be read .KeyError"),
        (0, {"TORCHELASTIC_RESTART_COUNT": "x"}, {}, "TORCHELASTIC_RESTART_COUNT='x': the launcher has to set"),
    ],
)
def test_check_world_wrong_launch_raises(world, gpus, variables, config, message):
    world(gpus=gpus, **variables)
    with pytest.raises(UserError, match=message):
        check_world(RunConfig(**config))


@pytest.mark.parametrize(
    ("gpus", "variables", "config", "use_cpu"),
    [
        (0, {"LOCAL_RANK": "-1"}, {}, None),
        (2, RANK_1_OF_2, {"num_processes": 2}, None),
        (0, RANK_1_OF_2 | {"TOOLKIT_LAUNCH": "folder"}, {"cpu": True, "max_restarts": 3}, None),
        (0, RANK_1_OF_2, {}, "true"),
    ],
)
def test_check_world_right_launch_passes_and_uses_cpu_without_gpu(world, gpus, variables, config, use_cpu):
    world(gpus=gpus, **variables)
    check_world(RunConfig(**config))
    assert os.environ.get("ACCELERATE_USE_CPU") == use_cpu


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_without_its_other_rank_ends_with_one_message(rank, tmp_path):
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = run_forked(
        *(*RECIPE, "--run-dir", str(tmp_path / "run"), "--process-timeout", "0.03"),
        env=environment(**variables, MASTER_PORT=str(free_port())),
        timeout_s=120,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "the processes did not start together" in line
    assert not (tmp_path / "run").exists()


def test_must_start_processes_is_false_in_ranks(world):
    world()
    assert must_start_processes(RunConfig(num_processes=2))
    assert not must_start_processes(RunConfig(num_processes=1))
    assert must_start_processes(RunConfig(max_restarts=1))
    world(**RANK_1_OF_2)
    assert not must_start_processes(RunConfig(num_processes=2))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_config_is_readable(path):
    load_config_from_file(str(path))


ACCELERATE = (
    f"accelerate.commands.accelerate_cli launch --config_file {CONFIGS}/multi_node.yaml --num_machines 2 "
    "--num_processes 4 --main_process_ip 127.0.0.1 --main_process_port {port} --machine_rank {node}"
)
TORCHRUN = (
    "torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port {port} "
    "--node-rank {node}"
)


@pytest.mark.parametrize("launcher", [ACCELERATE, TORCHRUN], ids=["accelerate", "torchrun"])
def test_launchers_of_two_machines_make_one_world(launcher, tmp_path):
    port = free_port()
    words = [*RECIPE, "--run-dir", str(tmp_path / "run")]
    machines = [
        ForkedPython("-m", *launcher.format(port=port, node=node).split(), *words, cwd=tmp_path, env=environment())
        for node in range(2)
    ]
    try:
        for machine in machines:
            _, err = machine.communicate(timeout=180)
            assert machine.returncode == 0, err
    finally:
        for machine in machines:
            machine.kill()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["world_size"] == 4
