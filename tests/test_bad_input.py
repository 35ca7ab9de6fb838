"""Bad input raises one-line errors before processes start, and equal errors on all ranks of a run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from filelock import FileLock

from benchmarks.support.processes import ROOT, program_environment, run_distributed
from recipes.mnist_moe import PRESETS, main
from tests.integrations.accelerate.toy import error_of
from toolkit.run import cli
from toolkit.run.launch import agent

# Words on the command line, the preset excepted -> part of the error.
ERRORS_BEFORE_START = {
    "--num-processes 2 --cpu --experst 4": "Did you mean --experts?",
    "--planner swap": "Did you mean --replan.planner?",
    "--save-dir x": "Did you mean --run-dir?",
    "--num_seeds 10": "unknown flag --num-seeds. See --help all.",
    "--zzz 1": "unknown flag --zzz",
    "something": "unknown preset 'something'",
    "--epochs 3 top2": "top2: comes after flags. Put the preset first.",
    "--run-dir=": "--run-dir: has no value",
    "--lr nan": "lr=nan: input should be",
    "--gradient-accumulation-steps 3": "batch_size=64: it must divide by",
    "--num-processes 3 --cpu": "it must divide by 3",
    "--max-experts 8 --spare-slots 1": "spare_slots=1: dynamic experts",
    "--max-experts 8 --compile": "compile=True: dynamic experts",
    "--max-experts 8 --dense-parallel fsdp2": "dense_parallel='fsdp2': dynamic experts",
    "--replan.planner swapp": "replan.planner='swapp': take one of contiguous, ",
}


@pytest.mark.parametrize("words", ERRORS_BEFORE_START)
def test_invalid_flags_raise_before_processes_start(words, monkeypatch, capfd):
    def start(*_: Any) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(agent, "start_processes", start)
    preset = ["debug"] if words.startswith("-") else []
    monkeypatch.setattr(sys, "argv", ["mnist_moe.py", *preset, *words.split()])
    with pytest.raises(SystemExit) as exit_info:
        cli.run_recipe(start, PRESETS)
    out, err = capfd.readouterr()
    assert (exit_info.value.code, out) == (2, "")
    assert re.fullmatch("error: .*\n", err), err
    assert ERRORS_BEFORE_START[words] in err


WITHOUT_TORCH = """
import runpy, sys
bad = ("--experst 4", "--lr nan", "--num-processes 3 --cpu", "--replan.planner swapp")
for recipe, words in [*(("mnist_moe", words) for words in bad), *((name, "--help") for name in sys.argv[1:])]:
    sys.argv = [f"{recipe}.py", "debug", *words.split()]
    try:
        runpy.run_path(f"recipes/{recipe}.py", run_name="__main__")
    except SystemExit as exit:
        assert exit.code == (0 if words == "--help" else 2)
print(*{"torch", "accelerate", "transformers", "datasets"} & sys.modules.keys(), "toolkit.errors" in sys.modules)
"""


def test_invalid_flags_and_help_do_not_import_torch():
    environment = program_environment(PYTHONPATH=f"{ROOT}:{ROOT}/recipes")
    command = [sys.executable, "-c", WITHOUT_TORCH, *(path.stem for path in ROOT.glob("recipes/*.py"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True"), done.stderr
    assert [line.startswith("error: ") for line in done.stderr.splitlines()] == [True] * 4


# Words after the preset, with files and runs in {folder} -> part of the error.
ERRORS_IN_RUN = {
    "--dataset mnist --data-dir {folder}/nowhere": "nowhere",
    "--dataset mnist --data-dir {folder}/empty": "/empty",
    "--dataset auto --data-dir {folder}/empty": "/empty",
    "--dataset mnist --data-dir {folder}/corrupt": "train-00000-of-00001.parquet",
    "--dataset cifar": "dataset='cifar'",
    "--run-dir {folder}/file/run": "/file/run: Not a directory",
    "--run-dir {folder}/file": "/file: File exists",
    "--run-dir /proc/toolkit-run": "/proc/toolkit-run: ",
    "--run-dir {folder}/locked": "another job uses this folder",
    "--run-dir {folder}/finished": "finished run",
    "--run-dir {folder}/stopped --lr 0.5": "lr",
    "--run-dir {folder}/stopped --resume no": "resume='no'",
    "--run-dir {folder}/empty --resume": "resume='yes'",
    "--run-dir {folder}/without_checkpoint --resume": "resume='yes'",
    "--run-dir {folder}/other_sizes": "checkpoint",
    "--mixed-precision fp16": "mixed_precision='fp16'",
    "--experts 6 --ep-size 3": "ep_size=3",
    "--exchange hierarchical": "exchange='hierarchical'",
}
COMMON = ["debug", "--tracker", "none", "--cpu", "--max-steps", "2"]


def error_of_run(*flags: str) -> str:
    """Return the error of the recipe on this rank, "" if it raises none."""
    return error_of(main, cli.parse(PRESETS, [*COMMON, *flags]))


def errors_of_rank(folder: Path) -> dict[str, str]:
    for name in ("finished", "stopped", "without_checkpoint"):
        assert error_of_run("--run-dir", str(folder / name)) == ""
    assert error_of_run("--run-dir", str(folder / "other_sizes"), "--expert-hidden-size", "16") == ""
    if dist.get_rank() == 0:
        for name in ("stopped", "without_checkpoint", "other_sizes"):
            (folder / name / "results.json").unlink()
        shutil.rmtree(folder / "without_checkpoint" / "checkpoints")
        config = folder / "other_sizes" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"expert_hidden_size": 32}))
    errors = {}
    for words in ERRORS_IN_RUN:
        dist.barrier()
        errors[words] = error_of_run(*words.format(folder=folder).split())
    return errors


@pytest.fixture(scope="module")
def errors_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "file").write_text("")
    for name in ("empty", "corrupt", "locked"):
        (folder / name).mkdir()
    for split in ("train", "test"):
        (folder / "corrupt" / f"{split}-00000-of-00001.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    with FileLock(folder / "locked" / ".lock"):
        return run_distributed(errors_of_rank, 2, folder)


@pytest.mark.parametrize("words", ERRORS_IN_RUN)
def test_errors_in_a_run_are_equal_on_all_ranks(words: str, errors_of_ranks: list[dict[str, str]]):
    first, second = (errors[words] for errors in errors_of_ranks)
    assert ERRORS_IN_RUN[words] in first
    assert "\n" not in first
    assert second == first
