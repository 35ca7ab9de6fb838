"""Faults that a user is told of in one line: of data, flags, manifests, W&B, signals, memory, secrets."""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.lab import Attempt, Fault, Lab, png, write_parquet
from benchmarks.faults.server import ROOT, Process
from toolkit.experts.state import manifest

# --- what is planted in the process -------------------------------------------------------------------------------

AT_STEP_12 = """
import os, signal
import toolkit.train.trainer
step = toolkit.train.trainer.Trainer.train_step
def disturbed(self, micro_batches):
    if self.state.step == 12:
        {line}
    step(self, micro_batches)
toolkit.train.trainer.Trainer.train_step = disturbed
"""
NAN = AT_STEP_12.format(line="next(self.raw_model.parameters()).data.fill_(float('nan'))")
TERMINATE = AT_STEP_12.format(line="os.kill(os.getpid(), signal.SIGTERM)")
REMOVE_FOLDER = AT_STEP_12.format(line="import shutil; shutil.rmtree(self.run.folder)")
OUT_OF_MEMORY = AT_STEP_12.format(line="import torch; torch.empty(2**50)")
RATE_ZERO = """
import torch
import toolkit.train.optim as standard
build = standard.build_optimizer
def with_a_scheduler(*given, **named):
    optimizer = build(*given, **named)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    return optimizer
standard.build_optimizer = with_a_scheduler
"""
NO_ROOM_FOR_CHECKPOINTS = """
import toolkit.experts.state.checkpoint_files as checkpoint_files
save = checkpoint_files.save_file
def full(tensors, path, *more):
    if "step-00000020" in str(path):
        raise OSError(28, "No space left on device")
    save(tensors, path, *more)
checkpoint_files.save_file = full
"""
NO_ROOM_FOR_METRICS = """
import toolkit.run.tracking.jsonl as jsonl
write, calls = jsonl.MetricsFile._write, []
class Full:
    def __init__(self, file):
        self.file = file
    def write(self, text):
        calls.append(1)
        if len(calls) < 4:
            raise OSError(28, "No space left on device")
        return self.file.write(text)
    def __getattr__(self, name):
        return getattr(self.file, name)
def guarded(self):
    if not isinstance(self._file, Full):
        self._file = Full(self._file)
    write(self)
jsonl.MetricsFile._write = guarded
"""
KILLED_BEFORE_PICTURES = """
import os
import toolkit.run.run
toolkit.run.run.Run._draw = lambda *_: os.kill(os.getpid(), 9)
"""
SIGNAL_WHILE_IMPORTING = """
import os
class Interrupt:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Interrupt())
"""


# --- data -----------------------------------------------------------------------------------------------------------


def parquet_images(labels: Sequence[Any], black: Sequence[int] = ()) -> Callable[[Lab, Path], None]:
    """Write a set of Parquet files whose training split has `labels`, and black images in rows `black`."""

    def write(_: Lab, folder: Path) -> None:
        draws = np.random.default_rng(0)
        for split, its_labels in (("train", labels), ("test", [1, 2])):
            pixels = draws.integers(0, 256, (len(its_labels), 28, 28), dtype=np.uint8)
            if split == "train":
                pixels[list(black)] = 0
            images = [{"bytes": png(image), "path": None} for image in pixels]
            write_parquet(bad_folder(folder) / f"{split}-00000-of-00001.parquet", image=images, label=its_labels)

    return write


def bad_folder(folder: Path) -> Path:
    """Of the images for the run in `folder`."""
    return Path(f"{folder}-bad")


def flip_a_checked_bit(lab: Lab, folder: Path) -> None:
    """A set whose pages have checksums, and then one bit of it flipped."""
    parquet_images([1, 2, 3])(lab, folder)
    paths = sorted(bad_folder(folder).glob("*.parquet"))
    content = bytearray(paths[1].read_bytes())
    content[len(content) // 2] ^= 4
    paths[1].write_bytes(content)


def null_activity(lab: Lab, _: Path) -> None:
    axes = {axis: [[1, 2, 3] * 60] * 2 for axis in "xyz"}
    write_parquet(
        lab.folder / "hmp" / "train-00000-of-00001.parquet", activity=["walk", None], volunteer=["a", "b"], **axes
    )


def wrong_digit(lab: Lab, _: Path) -> None:
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.random.default_rng(0).integers(-900, 900, 4000, dtype=np.int16).tobytes())
    for split in ("train", "test"):
        audio = [{"bytes": buffer.getvalue(), "path": None}] * 2
        path = lab.folder / "speech" / "fsdd" / f"{split}-00000-of-00001.parquet"
        write_parquet(path, audio=audio, digit=[3, 11], speaker=["a", "a"])


# --- what is done to folders and processes ----------------------------------------------------------------------------


def damage_metrics(_: Lab, folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0][:40], *lines[1:]]) + "\n")


def forge(**fields: Any) -> Callable[[Lab, Path], None]:
    """Change fields of the newest manifest, so that it still matches its own digest."""

    def change(_: Lab, folder: Path) -> None:
        newest = max((folder / "checkpoints").glob("step-*"))
        about = manifest.read_manifest(newest) | fields
        manifest.write_canonical(newest / manifest.NAME, about | {"digest": manifest.digest(about)})

    return change


def replace_manifest(text: str) -> Callable[[Lab, Path], object]:
    return lambda _, folder: (max((folder / "checkpoints").glob("step-*")) / manifest.NAME).write_text(text)


def link_weights(_: Lab, folder: Path) -> None:
    newest = max((folder / "checkpoints").glob("step-*"))
    weights = next(newest.glob("*.safetensors"))
    weights.unlink()
    weights.symlink_to("/dev/zero")


def flip_a_bit_of_a_cache(lab: Lab, _: Path) -> None:
    """Other runs use the common one."""
    shutil.copytree(lab.folder / "cache", lab.folder / "damaged_cache", dirs_exist_ok=True)
    for path in (lab.folder / "damaged_cache").glob("mnist-*/train_input.npy"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


def stop_a_rank(process: Process, folder: Path) -> None:
    """SIGSTOP for one of two processes, once they train."""
    import psutil

    path = folder / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and path.stat().st_size):
        time.sleep(0.02)
    ranks = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1"]
    for rank in ranks:
        rank.suspend()


def script_with_a_secret(lab: Lab, _: Path) -> None:
    """A copy of the recipe in a repository, with a password in what is not committed."""
    folder = lab.folder / "repository"
    folder.mkdir()
    shutil.copy(ROOT / "recipes" / "mnist_moe.py", folder)
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "recipe"]):
        subprocess.run([*git, *words], check=True)
    with (folder / "mnist_moe.py").open("a") as script:
        script.write('\nDB_PASSWORD = "xy1"\n')


def secret_in_code(_: Lab, folder: Path) -> str | None:
    text = (folder / "code.txt").read_text()
    return "password kept" if "xy1" in text or "DB_PASSWORD" not in text else None


# --- the table ------------------------------------------------------------------------------------------------------

CONTINUE = Attempt()
THEN_EXACTLY = "then continued exactly"
BAD_IMAGES = "--data-dir {folder}-bad"
KIND = "told in one line"
MODEL = f"{ROOT}/recipes/lm_moe.py debug --cpu"
NO_HUB = {"HF_HOME": "nowhere", "HF_HUB_OFFLINE": "1"}


def bad_images(name: str, says: str, *labels: Any, black: Sequence[int] = ()) -> Fault:
    return Fault(KIND, name, [Attempt(BAD_IMAGES, before=parquet_images(labels, black))], "refused", says)


def odd_manifest(name: str, change: Callable[[Lab, Path], object], says: str = "is passed over") -> Fault:
    return Fault(KIND, name, [Attempt(before=change)], "continued exactly", says, begins=20)


def faults() -> list[Fault]:
    """Every one of them."""
    return [
        Fault(
            KIND, "NaN weight", [Attempt(inside=NAN), CONTINUE], f"refused, {THEN_EXACTLY}", "step 13: .* not finite"
        ),
        Fault(
            KIND,
            "other data",
            [Attempt(data="other"), CONTINUE],
            f"refused, {THEN_EXACTLY}",
            "started with train data of 320 rows",
            begins=10,
        ),
        Fault(
            KIND,
            "ignored flag",
            [Attempt("--dense-parallel fsdp2")],
            "continued exactly",
            "--dense-parallel fsdp2: no effect",
        ),
        Fault(KIND, "scheduler at rate 0", [Attempt(inside=RATE_ZERO)], "continued exactly", "notice: the scheduler"),
        Fault(
            KIND,
            "two sets alike",
            [Attempt(data="other")],
            "continued exactly",
            "run folder",
            like="other",
        ),
        Fault(
            KIND,
            "damaged cache",
            [Attempt(before=flip_a_bit_of_a_cache, env={"TOOLKIT_CACHE_DIR": "{lab}/damaged_cache"})],
            "continued exactly",
            "run folder",
        ),
        Fault(
            KIND,
            "a process hangs",
            [Attempt("--num-processes 2 --process-timeout 0.1", during=stop_a_rank, anew=True)],
            "stopped",
            r"rank 1 of 2 was stopped \(SIGSTOP\)",
        ),
        Fault(
            KIND,
            "disk full at a checkpoint",
            [Attempt(inside=NO_ROOM_FOR_CHECKPOINTS)],
            "continued exactly",
            "no checkpoint at step 20",
        ),
        Fault(
            KIND, "disk full at metrics", [Attempt(inside=NO_ROOM_FOR_METRICS)], "continued exactly", "until there is"
        ),
        Fault(
            KIND,
            "killed before pictures",
            [Attempt(inside=KILLED_BEFORE_PICTURES), CONTINUE],
            f"killed, {THEN_EXACTLY}",
            "continuing at step 30",
        ),
        Fault(
            KIND, "damaged line of metrics", [Attempt(before=damage_metrics)], "continued exactly", "line 1 ", begins=10
        ),
        Fault(
            KIND,
            "damaged config.json",
            [Attempt(before=lambda _, folder: (folder / "config.json").write_text("{"))],
            "continued exactly",
            "is damaged and is written anew",
            begins=10,
        ),
        Fault(KIND, "folder removed", [Attempt(inside=REMOVE_FOLDER)], "continued exactly", "were removed while"),
        odd_manifest("manifest: a list", replace_manifest("[]\n")),
        odd_manifest("manifest: empty", replace_manifest("")),
        odd_manifest("manifest: nested deeply", replace_manifest("[" * 100_000)),
        odd_manifest("manifest: a path upwards", forge(files={"../../x.safetensors": {"bytes": 1, "sha256": ""}})),
        odd_manifest("manifest: a device", forge(files={"/dev/zero": {"bytes": 1, "sha256": ""}})),
        odd_manifest("manifest: other types", forge(files={"state.json": "whole"}, rows=[])),
        odd_manifest("weights: a link", link_weights),
        Fault(
            KIND,
            "W&B fails at its start",
            [Attempt("--tracker wandb", env={"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "{server}"})],
            "continued exactly",
            "W&B is offline|W&B is off",
        ),
        *(
            Fault(
                KIND,
                f"{number.name} while importing",
                [Attempt(inside=SIGNAL_WHILE_IMPORTING.format(number=int(number)), anew=True), CONTINUE],
                f"stopped, {THEN_EXACTLY}",
                "^stopped by ",
            )
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        ),
        Fault(
            KIND, "SIGTERM at step 12", [Attempt(inside=TERMINATE), CONTINUE], f"stopped, {THEN_EXACTLY}", "by SIGTERM"
        ),
        Fault(
            KIND,
            "out of memory",
            [Attempt(inside=OUT_OF_MEMORY), CONTINUE],
            f"refused, {THEN_EXACTLY}",
            "out of memory",
        ),
        bad_images("label out of range", "holds the label 10 in row 2", 1, 2, 10),
        bad_images("null label", "has the label None in row 1", 1, None, 3),
        bad_images("NaN label", "has the label .* in row 0", 1.0, float("nan"), 3.0),
        bad_images("black image", "all black in row 1", 1, 2, 3, black=[1]),
        bad_images("no rows", "has no rows"),
        Fault(
            KIND,
            "bit flipped in a file with checksums",
            [Attempt(BAD_IMAGES, before=flip_a_checked_bit)],
            "refused",
            "cannot be read as Parquet",
        ),
        Fault(
            KIND,
            "null activity",
            [Attempt("--data-dir {lab} --dataset hmp", command=f"{ROOT}/recipes/har.py debug", before=null_activity)],
            "refused",
            "has a null in row 1",
        ),
        Fault(
            KIND,
            "digit out of range",
            [
                Attempt(
                    "--data-dir {lab}/speech --dataset fsdd",
                    command=f"{ROOT}/recipes/lmu_speech.py debug --cpu",
                    before=wrong_digit,
                )
            ],
            "refused",
            "digit 11 in row 1",
        ),
        Fault(KIND, "tokenizer offline", [Attempt("--tokenizer gpt2", command=MODEL, env=NO_HUB)], "refused", "gpt2"),
        Fault(KIND, "data set offline", [Attempt("--dataset a/b", command=MODEL, env=NO_HUB)], "refused", "a/b"),
        Fault(
            KIND,
            "password in a diff",
            [
                Attempt(
                    command="{lab}/repository/mnist_moe.py debug --cpu --max-steps 1",
                    before=script_with_a_secret,
                    after=secret_in_code,
                )
            ],
            "finished",
            "run folder",
        ),
    ]
