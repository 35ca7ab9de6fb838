"""Bad input is refused with exit code 2 and one line that says what to do, on one process and on two."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from recipes.mnist_moe import PRESETS, main
from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT, program_environment, run_distributed, run_recipe
from toolkit.errors import UserError
from toolkit.run import cli
from toolkit.run.launch import supervisor

ON_PROCESSES = {1: [], 2: ["--num-processes", "2", "--cpu"]}

# What is typed (after the preset), and what the line must say.
REFUSED_BEFORE_ANYTHING_STARTS = [
    ("--experst 4", "did you mean --experts?"),
    ("--experst=4", "did you mean --experts?"),
    ("--expert-hidden 4", "did you mean --expert-hidden-size?"),
    ("--Lr 0.1", "did you mean --lr?"),
    ("--weight-decay 0.1", "use --optimizer.weight-decay"),
    ("--optimizer.weigth_decay 0.1", "did you mean --optimizer.weight-decay?"),
    ("--zzz 1", "unknown flag --zzz"),
    ("-x", "unknown flag -x"),
    ("full", "two presets, debug and full"),
    ("debugg", "did you mean debug?"),
    ("something", "unknown preset 'something'"),
    ("--epochs 1 full", "a preset comes first"),
    ("--epochs 1 2", "--epochs takes one value"),
    ("--cpu yes", "--cpu takes no value"),
    ("--cpu=yes", "a switch takes no value"),
    ("--experts", "--experts needs a value: take an integer"),
    ("--experts --epochs 1", "--experts needs a value"),
    ("--run-dir=", "--run-dir needs a value: take a path"),
    ("--experts four", "--experts four: take an integer"),
    ("--epochs 1.5", "--epochs 1.5: take an integer"),
    ("--lr fast", "--lr fast: take a number"),
    ("--max-steps soon", "--max-steps soon: take an integer or none"),
    ("--mixed-precision fp8", "take no, fp16, bf16 or none"),
    ("--tracker wand", "take none, wandb, tensorboard, trackio or all"),
    ("--resume maybe", "take auto, yes or no"),
    ("--parallel-strategy tensor", "take data_parallel or expert_parallel"),
    ("--schedule.name linear", "take constant, cosine or stable_decay"),
    ("--lr -1", "--lr -1.0: take a positive number"),
    ("--lr 0", "take a positive number"),
    ("--lr nan", "take a positive number"),
    ("--lr inf", "take a positive number"),
    ("--epochs 0", "take one or more"),
    ("--max-steps -3", "take one or more"),
    ("--batch-size 0", "take one or more"),
    ("--gradient-accumulation-steps 0", "take one or more"),
    ("--gradient-accumulation-steps 3", "--batch-size 64: it must divide by"),
    ("--num-workers -1", "take zero to 256"),
    ("--num-workers 2147483648", "take zero to 256"),
    ("--max-experts 3", "--max-experts 3: take --experts 4 or more"),
    ("--max-experts 8 --min-experts 1", "--min-experts 1: take --top-k 2 to --experts 4"),
    ("--max-experts 8 --spare-slots 1", "--spare-slots 1: leave it out: dynamic experts"),
    ("--max-experts 8 --initial-placement contiguous", "--initial-placement contiguous: leave it out: --max-experts"),
    ("--max-experts 8 --compile", "--compile True: leave it out"),
    ("--max-experts 8 --experts 0 --top-k 1", "--experts 0: take one or more with --max-experts"),
    ("--max-experts 8 --force-balanced", "--force-balanced True: leave it out"),
    ("--max-experts 8 --dense-parallel fsdp2", "use ddp with --max-experts"),
    ("--max-experts 8 --lifecycle.merge-distance 2", "--lifecycle.merge-distance 2.0: take a fraction from 0 to 1"),
    ("--max-experts 8 --lifecycle.min-sleep-every 3000", "take 1 to --lifecycle.max-sleep-every 2000"),
    ("--max-experts 8 --lifecycle.replay-lr 0", "--lifecycle.replay-lr 0.0: take a positive number"),
    ("--max-experts 8 --lifecycle.new-expert copy", "take split or fresh"),
    ("--log-every 0", "take one or more"),
    ("--seed -1", "take zero or more"),
    ("--seed 9999999999", "below 2**32"),
    ("--seed 99999999999999999999", "take an integer of at most 9223372036854775807"),
    ("--experts -1", "take one or more"),
    ("--experts 0", "--experts 0: a dense network has no --top-k 2: add --top-k 1"),
    ("--optimizer adam", "it is a group of flags: --optimizer.beta1, --optimizer.beta2, --optimizer.eps, "),
    ("--config nothing.yaml", "--config nothing.yaml: cannot be read (No such file or directory)"),
    ("--top-k 0", "take 1 to 4, the number of --experts"),
    ("--top-k 5", "take 1 to 4, the number of --experts"),
    ("--expert-hidden-size 0", "take one or more"),
    ("--balance-weight nan", "take zero or more"),
    ("--z-weight -1", "take zero or more"),
    ("--dim 0", "take one or more"),
    ("--ep-size 0", "take one or more"),
    ("--ep-size 5", "--ep-size 5: take at most 4, the number of --experts"),
    ("--planner swapp", "--planner swapp: take one of affinity, contiguous, "),
    ("--replan-every 0", "take one step or more"),
    ("--spare-slots -1", "take zero or more"),
    ("--exchange hierarchical --parallel-strategy data_parallel", "use flat, because no experts are spread"),
    ("--dispatch-chunks 0", "--dispatch-chunks 0: take one or more"),
    ("--dispatch-chunks 2 --compile", "--dispatch-chunks 2: use 1 with --compile"),
    ("--dispatch-chunks 2 --ep-size 1", "--dispatch-chunks 2: use 1, because no experts are spread"),
    ("--ep-size 2 --parallel-strategy data_parallel", "use --parallel-strategy expert_parallel"),
    ("--ep-stride 0", "--ep-stride 0: take one or more"),
    ("--ep-stride 2 --parallel-strategy data_parallel", "--ep-stride 2: leave it out, or use --parallel-strategy"),
    ("--ep-size 2 --ep-stride 3 --num-processes 4", "--ep-stride 3: it must divide the 2 group(s) of --ep-size 2"),
    ("--fsdp-size 1", "--fsdp-size 1: take two or more, or --dense-parallel ddp"),
    ("--fsdp-size 3 --num-processes 4", "--fsdp-size 3: it must divide --num-processes 4"),
    ("--optimizer.beta1 1", "not including, 1"),
    ("--optimizer.eps 0", "take a positive number"),
    ("--optimizer.eps inf", "take a positive number"),
    ("--optimizer.weight-decay -0.1", "take zero or more"),
    ("--optimizer.max-grad-norm nan", "none for no clipping"),
    ("--schedule.warmup-steps -1", "take zero or more"),
    ("--schedule.final 2", "between 0 and 1"),
    ("--schedule.decay-steps 0", "take one step or more"),
    ("--checkpoint.keep 0", "keep at least one"),
    ("--max-restarts -1", "--max-restarts -1: take zero or more"),
    ("--step-timeout 0", "--step-timeout 0.0: take seconds above 0, up to 31622400, or none"),
    ("--peak-flops 0", "--peak-flops 0.0: take FLOPs per second above 0, or none"),
    ("--on-nonfinite maybe", "--on-nonfinite maybe: take stop or skip"),
    ("--resume-from 0", "--resume-from 0: take the step of a checkpoint"),
    ("--resume-from 5 --resume no", "leave --resume no out"),
    ("--extend --resume no", "--extend True: leave --resume no out"),
    ("--ddp.bucket-cap-mb 0", "--ddp.bucket-cap-mb 0: take one MiB or more"),
    ("--max-experts 8 --lifecycle.grow-every 0", "--lifecycle.grow-every 0: take one or more, or none"),
    ("--max-experts 8 --lifecycle.trial-gain -1", "--lifecycle.trial-gain -1.0: take zero or more"),
    ("--checkpoint.every-steps 0", "take one step or more"),
    ("--num-processes 0", "--num-processes 0: take one or more"),
    ("--num-processes 3 --cpu", "it must divide by 3"),
]


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize("num_processes", ON_PROCESSES)
@pytest.mark.parametrize(("typed", "line"), REFUSED_BEFORE_ANYTHING_STARTS)
def test_what_can_be_known_is_refused_before_anything_starts(
    typed: str, line: str, num_processes: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def start(*_: Any) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(supervisor, "start_processes", start)
    # The case comes last, so that where both speak of --num-processes it is the one that counts.
    words = typed.split()
    flags = ON_PROCESSES[num_processes] if typed.startswith("-") else []
    monkeypatch.setattr(sys, "argv", ["mnist_moe.py", "debug", *flags, *words])
    if words[0] in ("debugg", "something"):
        sys.argv[1:] = [*words, *ON_PROCESSES[num_processes]]
    with pytest.raises(SystemExit) as left:
        cli.run_recipe(start, PRESETS)
    out, err = capfd.readouterr()
    assert left.value.code == 2
    assert out == ""
    assert_one_line(err, line)


def assert_one_line(err: str, says: str) -> None:
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n"), err
    assert says in err


@pytest.mark.parametrize("typed", ["--experst 4", "--lr nan", "--num-processes 3 --cpu", "--planner swapp"])
def test_bad_input_is_answered_without_loading_torch(typed: str):
    done = run_recipe("mnist_moe", "debug", *typed.split(), env={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert len(said) == 1
    assert "toolkit.errors" in imported
    assert not {"torch", "accelerate", "transformers", "datasets"} & set(imported)


# --- what only a run that has begun can know ---------------------------------------------------------------------


# Name: what is typed after the preset, with {folder} for one that `prepare` filled, and what the line must say.
REFUSED_AFTER_THE_START = {
    "data folder that is not there": ("--dataset mnist --data-dir {folder}/nowhere", "nowhere"),
    "data folder without the set": ("--dataset mnist --data-dir {folder}/empty", "/empty"),
    "data folder without the set, auto": ("--dataset auto --data-dir {folder}/empty", "/empty"),
    "corrupt parquet": ("--dataset mnist --data-dir {folder}/corrupt", "train-00000-of-00001.parquet"),
    "truncated idx": ("--dataset mnist --data-dir {folder}/truncated", "train-images-idx3-ubyte"),
    "unknown set": ("--dataset cifar", "--dataset cifar"),
    "run folder below a file": ("--run-dir {folder}/file/run", "--run-dir"),
    "run folder that is a file": ("--run-dir {folder}/file", "--run-dir"),
    "run folder that cannot be written": ("--run-dir /proc/toolkit-run", "--run-dir"),
    "locked run folder": ("--run-dir {folder}/locked", "another job uses this folder"),
    "finished run": ("--run-dir {folder}/finished", "finished run"),
    "other numbers": ("--run-dir {folder}/stopped --lr 0.5", "--lr"),
    "run that must not be continued": ("--run-dir {folder}/stopped --resume no", "--resume no"),
    "resume from nothing": ("--run-dir {folder}/empty --resume", "--resume yes"),
    "resume without a checkpoint": ("--run-dir {folder}/bare --resume", "--resume yes"),
    "foreign checkpoint": ("--run-dir {folder}/foreign", "checkpoint"),
    "fp16 on a CPU": ("--mixed-precision fp16", "--mixed-precision fp16"),
    "ep_size beyond the world": ("--experts 6 --ep-size 3", "--ep-size 3"),
    "an exchange between the nodes of one": ("--exchange hierarchical", "--exchange hierarchical"),
}
COMMON = ["debug", "--tracker", "none", "--cpu", "--max-steps", "2"]


def prepare(folder: Path) -> None:
    """The files that the cases speak of, but for the runs."""
    (folder / "file").write_text("")
    for name in ("empty", "corrupt", "truncated", "locked"):
        (folder / name).mkdir()
    for split in ("train", "test"):
        (folder / "corrupt" / f"{split}-00000-of-00001.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    for split, count in (("train", 60), ("t10k", 10)):
        images, labels = struct.pack(">IIII", 2051, count, 28, 28), struct.pack(">II", 2049, count)
        (folder / "truncated" / f"{split}-images-idx3-ubyte").write_bytes(images + bytes(100))
        (folder / "truncated" / f"{split}-labels-idx1-ubyte").write_bytes(labels + bytes(count))


def attempt(*flags: str) -> str | None:
    """What this rank is told when it runs the recipe; None when that went to the end."""
    try:
        main(cli.parse(PRESETS, [*COMMON, *flags]))
    except UserError as error:
        return str(error)
    return None


def refusals(folder: Path) -> dict[str, str | None]:
    """What this rank is told in each case. A collective."""
    import torch.distributed as dist

    for name in ("finished", "stopped", "bare"):
        assert attempt("--run-dir", str(folder / name)) is None
    assert attempt("--run-dir", str(folder / "foreign"), "--expert-hidden-size", "16") is None
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name in ("stopped", "bare", "foreign"):
            (folder / name / "results.json").unlink()
        shutil.rmtree(folder / "bare" / "checkpoints")
        config = json.loads((folder / "foreign" / "config.json").read_text())
        (folder / "foreign" / "config.json").write_text(json.dumps(config | {"expert_hidden_size": 32}))
    told = {}
    for name, (typed, _) in REFUSED_AFTER_THE_START.items():
        if dist.is_initialized():
            dist.barrier()
        told[name] = attempt(*typed.format(folder=folder).split())
    return told


@pytest.fixture(scope="module", params=ON_PROCESSES, ids=lambda count: f"{count} process(es)")
def told_to_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("bad_input")
    prepare(folder)
    with FileLock(folder / "locked" / ".lock"):
        return run_distributed(refusals, request.param, folder)


@pytest.mark.parametrize("name", REFUSED_AFTER_THE_START)
def test_what_only_a_run_can_know_is_refused_on_all_ranks_alike(name: str, told_to_ranks: list[dict[str, str]]):
    first = told_to_ranks[0][name]
    assert first is not None, "it ran"
    assert REFUSED_AFTER_THE_START[name][1] in first
    assert "\n" not in first
    assert [told[name] for told in told_to_ranks] == [first] * len(told_to_ranks)


@pytest.mark.parametrize("flags", ON_PROCESSES.values(), ids=lambda flags: "2 processes" if flags else "1 process")
@pytest.mark.parametrize("name", ["corrupt parquet", "locked run folder"])
def test_a_run_that_is_refused_leaves_with_code_2_and_one_line(name: str, flags: list[str], tmp_path: Path):
    prepare(tmp_path)
    typed, says = REFUSED_AFTER_THE_START[name]
    with FileLock(tmp_path / "locked" / ".lock"):
        words = [*COMMON, *flags, *typed.format(folder=tmp_path).split()]
        done = run_forked(str(ROOT / "recipes" / "mnist_moe.py"), *words, cwd=tmp_path)
    assert done.returncode == 2
    assert_one_line(done.stderr, says)


@pytest.mark.parametrize("flags", ON_PROCESSES.values(), ids=lambda flags: "2 processes" if flags else "1 process")
def test_a_tracker_that_cannot_be_reached_does_not_stop_a_run(flags: list[str], tmp_path: Path):
    nobody_listens = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    done = run_forked(
        *(
            "recipes/mnist_moe.py",
            "debug",
            "--cpu",
            *flags,
            "--tracker",
            "wandb",
            "--max-steps",
            "3",
            "--log-every",
            "1",
        ),
        *("--run-dir", str(tmp_path / "run")),
        env=program_environment(**nobody_listens),
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {1, 2, 3}
    assert (tmp_path / "run" / "results.json").exists()
