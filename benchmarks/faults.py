"""Injects faults into small runs, and shows what a user sees of each: a run is refused or stopped in one line, or it
goes on exactly. Nothing is silent.

    python benchmarks/faults.py                    all of them, a few minutes on two cores
    python benchmarks/faults.py --sample 5         five, spread over the list
    python benchmarks/faults.py --only manifest    those whose name holds a word

Every run is `debug` of a recipe, on made-up images, beside one that nothing happened to. Verdicts of an attempt:

    refused              exit code 2 and one line
    stopped              exit code 75, 130 or 1, and no traceback
    killed               ended by SIGKILL, which is the fault
    continued exactly    exit code 0; metrics, results and weights are those of the run that nothing happened to
    finished             exit code 0, where there is nothing to compare with

A fault of several attempts has a verdict for each. "silent" is a run that did not say what it should. Exit code 1 where
any verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import io
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.same_numbers import differences, environment, read_records
from toolkit.checkpoint import manifest
from toolkit.tracking.jsonl import read_metrics

FLAGS = "debug --cpu --epochs 6 --log-every 5 --checkpoint.every-steps 10 --checkpoint.keep 9"
"""30 steps, three checkpoints."""
TIME_LIMIT_S = 300
RUN_WITH = """
import runpy, sys
sys.argv = sys.argv[1:]
{inside}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a recipe in which a fault was planted."""

# --- what is planted in the process -------------------------------------------------------------------------------

AT_STEP_12 = """
import os, signal
import toolkit.trainer
step = toolkit.trainer.Trainer.train_step
def disturbed(self, micro_batches):
    if self.state.step == 12:
        {line}
    step(self, micro_batches)
toolkit.trainer.Trainer.train_step = disturbed
"""
NAN = AT_STEP_12.format(line="next(self.raw_model.parameters()).data.fill_(float('nan'))")
TERMINATE = AT_STEP_12.format(line="os.kill(os.getpid(), signal.SIGTERM)")
REMOVE_FOLDER = AT_STEP_12.format(line="import shutil; shutil.rmtree(self.run.folder)")
OUT_OF_MEMORY = AT_STEP_12.format(line="import torch; torch.empty(2**50)")
RATE_ZERO = """
import torch
import toolkit.standard.trainer as standard
build = standard.build_optimizer
def with_a_scheduler(*given, **named):
    optimizer = build(*given, **named)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    return optimizer
standard.build_optimizer = with_a_scheduler
"""
NO_ROOM_FOR_CHECKPOINTS = """
import toolkit.checkpoint.checkpoint as checkpoint
save = checkpoint.save_file
def full(tensors, path, *more):
    if "step-00000020" in str(path):
        raise OSError(28, "No space left on device")
    save(tensors, path, *more)
checkpoint.save_file = full
"""
NO_ROOM_FOR_METRICS = """
import toolkit.tracking.jsonl as jsonl
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


# --- the runs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """One command."""

    flags: str = ""
    """{lab} is the folder of everything."""
    inside: str = ""
    """Python that is run in the process before the recipe."""
    before: Callable[[Lab, Path], object] | None = None
    """What is done to the run's folder first."""
    during: Callable[[subprocess.Popen[str], Path], object] | None = None
    """What is done to the process while it runs."""
    after: Callable[[Lab, Path], str | None] | None = None
    """Looks at the run's folder for what must not be there."""
    env: Mapping[str, str] = field(default_factory=dict)
    data: str = "data"
    """The folder of the images."""
    command: str = ""
    """The words of a command that does not train on images."""


@dataclass(frozen=True)
class Fault:
    """A fault, in the words of a table."""

    item: int
    """What it is about: 1 values that are not finite, 2 other data, 3 flags, 4 rates, 6 the cache, 7 processes that
    hang, 8 full disks, 9 kills at the end, 10 metrics, 11 config and folder, 12 manifests, 13 W&B, 14 signals,
    15 memory, 16 data, 17 the Hub, 18 secrets."""
    name: str
    attempts: Sequence[Attempt]
    expected: str
    says: str
    """A regular expression that a line for the user matches, in one of the attempts."""
    begins: int | None = None
    """Begin in the folder of a run that was stopped after this step, instead of a new one."""
    like: str = "data"
    """The images of the run to compare with."""


@dataclass(frozen=True)
class Seen:
    """What a user sees of an attempt."""

    code: int
    out: str
    err: str


class Failing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200)

    def do_POST(self) -> None:
        self.answer(500)

    def answer(self, code: int) -> None:
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


class Lab:
    """A temporary folder with data, runs and a cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        write_images(folder / "data" / "mnist", seed=0)
        write_images(folder / "other" / "mnist", seed=1)
        for path in (folder / "data" / "mnist").iterdir():
            times = path.stat()
            os.utime(folder / "other" / "mnist" / path.name, ns=(times.st_atime_ns, times.st_mtime_ns))

    @cached_property
    def reference(self) -> Path:
        """A run that nothing happened to."""
        return self.undisturbed("data")

    @cached_property
    def other_reference(self) -> Path:
        """The same on the other images, in a cache of its own."""
        return self.undisturbed("other", TOOLKIT_CACHE_DIR=str(self.folder / "other_cache"))

    @cached_property
    def server(self) -> str:
        """The address of a W&B server that answers to be there, and then fails."""
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    def undisturbed(self, data: str, **env: str) -> Path:
        folder = self.folder / f"undisturbed-{data}"
        seen = self.run(Attempt(data=data, env=env), folder)
        if seen.code:
            raise SystemExit(f"error: a run that nothing happened to ends with {seen.code}: {seen.err}")
        return folder

    def run(self, attempt: Attempt, folder: Path) -> Seen:
        words = attempt.command or f"{ROOT}/recipes/mnist_moe.py {FLAGS} --dataset auto"
        words = f"{words} --run-dir {folder} {attempt.flags}".format(lab=self.folder)
        if "--tracker" not in words:
            words += " --tracker none"
        code = RUN_WITH.format(inside=attempt.inside)
        env = environment(ROOT, self.folder / "cache") | {"TOOLKIT_DATA_DIR": str(self.folder / attempt.data)}
        process = subprocess.Popen(
            [sys.executable, *(["-c", code] if attempt.inside else []), *words.split()],
            cwd=self.folder,
            env=env | {name: value.format(server=self.server) for name, value in attempt.env.items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            if attempt.during is not None:
                attempt.during(process, folder)
            out, err = process.communicate(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"no end within {TIME_LIMIT_S} s\n"
        return Seen(process.returncode, out, err)

    def stopped_run(self, step: int, folder: Path) -> None:
        """Make `folder` what a run leaves that was killed after the checkpoint of `step`."""
        shutil.copytree(self.reference, folder)
        for path in folder.iterdir():
            if path.suffix in (".png", ".txt") or path.name == "results.json":
                path.unlink()
        for path in (folder / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)

    def examine(self, fault: Fault, place: int) -> tuple[list[Seen], str]:
        """What a user sees of `fault`, and the verdict."""
        folder = self.folder / f"run-{place}"
        if fault.begins is not None:
            self.stopped_run(fault.begins, folder)
        every, verdicts = [], []
        for attempt in fault.attempts:
            if attempt.before is not None:
                attempt.before(self, folder)
            every.append(self.run(attempt, folder))
            reference = None
            if not attempt.command and not every[-1].code:
                reference = self.reference if fault.like == "data" else self.other_reference
            found = attempt.after(self, folder) if attempt.after is not None else None
            verdicts.append(found or verdict(every[-1], folder, reference))
        if matching(fault, every) is None:
            verdicts.append("silent")
        return every, ", then ".join(verdicts)


def verdict(seen: Seen, folder: Path, reference: Path | None) -> str:
    """The verdict on an attempt, which is compared with the run in `reference`, if any."""
    lines = seen.err.strip().splitlines()
    if "Traceback" in seen.err:
        return "traceback"
    if seen.code == 2:
        return "refused" if len(lines) == 1 else f"refused in {len(lines)} lines"
    if seen.code in (75, 130, 1) and lines:
        return "stopped"
    if seen.code == -signal.SIGKILL:
        return "killed"
    if seen.code:
        return f"ended with {seen.code}"
    if reference is None:
        return "finished"
    found = list(unlike(reference, folder))
    return f"continued otherwise ({found[0]})" if found else "continued exactly"


def unlike(reference: Path, folder: Path) -> list[str]:
    """What differs between two finished runs: metrics, results, or the last weights."""
    pictures = {path.name for path in reference.glob("*.png")} - {path.name for path in folder.glob("*.png")}
    found = [f"no {name}" for name in sorted(pictures)]
    path, before = folder / "metrics.jsonl", read_records(reference / "metrics.jsonl")
    lines = {line["step"]: line for line in read_metrics(path)}
    unreadable = len(path.read_text().splitlines()) - len(lines)
    expected = [line for line in before if line["step"] in lines]
    if len(before) - len(expected) != unreadable:
        found.append(f"{len(expected)} of {len(before)} lines of metrics")
    found += differences(expected, list(lines.values()), {})
    found += differences(read_records(reference / "results.json"), read_records(folder / "results.json"), {})
    if digests(reference) != digests(folder):
        found.append("other weights")
    return found


def digests(folder: Path) -> dict[str, str]:
    """Of the weights and optimizer states in the last checkpoint."""
    files = manifest.read_manifest(max((folder / "checkpoints").glob("step-*")))["files"]
    return {name: about["sha256"] for name, about in files.items() if name.endswith(".safetensors")}


def matching(fault: Fault, every: Sequence[Seen]) -> str | None:
    """The line that tells the user of `fault`."""
    lines = [line for seen in every for line in (seen.out + "\n" + seen.err).splitlines()]
    return next((line for line in lines if re.search(fault.says, line)), None)


# --- data -----------------------------------------------------------------------------------------------------------


def write_images(folder: Path, seed: int, train: int = 320) -> None:
    """A set in the files of MNIST's publishers, random."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(seed)
    for stem, count in (("train", train), ("t10k", 64)):
        images = draws.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        head = struct.pack(">HBB3i", 0, 8, 3, *images.shape)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = draws.integers(0, 10, count, dtype=np.uint8)
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBi", 0, 8, 1, count) + labels.tobytes())


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def parquet_images(labels: Sequence[Any], black: Sequence[int] = ()) -> Callable[[Lab, Path], None]:
    """Write a set of Parquet files whose training split has `labels`, and black images in rows `black`."""

    def write(lab: Lab, _: Path) -> None:
        draws = np.random.default_rng(0)
        for split, its_labels in (("train", labels), ("test", [1, 2])):
            pixels = draws.integers(0, 256, (len(its_labels), 28, 28), dtype=np.uint8)
            if split == "train":
                pixels[list(black)] = 0
            images = [{"bytes": png(image), "path": None} for image in pixels]
            write_parquet(lab.folder / "bad" / f"{split}-00000-of-00001.parquet", image=images, label=its_labels)

    return write


def write_parquet(path: Path, **columns: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def flip_a_listed_bit(lab: Lab, folder: Path) -> None:
    """A set with a list of digests, and then one bit of it flipped."""
    parquet_images([1, 2, 3])(lab, folder)
    paths = sorted((lab.folder / "bad").glob("*.parquet"))
    listed = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths)
    (lab.folder / "bad" / "SHA256SUMS").write_text(listed)
    content = bytearray(paths[1].read_bytes())
    content[len(content) // 2] ^= 4
    paths[1].write_bytes(content)


def without_list(lab: Lab, _: Path) -> None:
    (lab.folder / "bad" / "SHA256SUMS").unlink(missing_ok=True)


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
        manifest.write_json(newest / manifest.NAME, about | {"digest": manifest.digest(about)})

    return change


def replace_manifest(text: str) -> Callable[[Lab, Path], object]:
    return lambda _, folder: (max((folder / "checkpoints").glob("step-*")) / manifest.NAME).write_text(text)


def link_weights(_: Lab, folder: Path) -> None:
    newest = max((folder / "checkpoints").glob("step-*"))
    weights = next(newest.glob("*.safetensors"))
    weights.unlink()
    weights.symlink_to("/dev/zero")


def flip_a_bit_of_the_cache(lab: Lab, _: Path) -> None:
    lab.reference  # noqa: B018  fills the cache
    for path in (lab.folder / "cache").glob("mnist-*/train_input.npy"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


def stop_a_rank(process: subprocess.Popen[str], folder: Path) -> None:
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
BAD_IMAGES = "--data-dir {lab}/bad"
MODEL = f"{ROOT}/recipes/lm_moe.py debug --cpu"
NO_HUB = {"HF_HOME": "nowhere", "HF_HUB_OFFLINE": "1"}


def bad_images(name: str, says: str, *labels: Any, black: Sequence[int] = ()) -> Fault:
    def write(lab: Lab, folder: Path) -> None:
        without_list(lab, folder)
        parquet_images(labels, black)(lab, folder)

    return Fault(16, name, [Attempt(BAD_IMAGES, before=write)], "refused", says)


def odd_manifest(name: str, change: Callable[[Lab, Path], object], says: str = "is passed over") -> Fault:
    return Fault(12, name, [Attempt(before=change)], "continued exactly", says, begins=20)


def faults() -> list[Fault]:
    """Every fault, in the order of the table."""
    return [
        Fault(1, "NaN weight", [Attempt(inside=NAN), CONTINUE], f"refused, {THEN_EXACTLY}", "step 13: .* not finite"),
        Fault(
            2,
            "other data",
            [Attempt(data="other"), CONTINUE],
            f"refused, {THEN_EXACTLY}",
            "started with train data of 320 rows",
            begins=10,
        ),
        Fault(
            3,
            "ignored flag",
            [Attempt("--dense-parallel fsdp2")],
            "continued exactly",
            "--dense-parallel fsdp2: no effect",
        ),
        Fault(4, "scheduler at rate 0", [Attempt(inside=RATE_ZERO)], "continued exactly", "notice: the scheduler"),
        Fault(
            6,
            "two sets alike",
            [Attempt(data="other", before=lambda lab, _: lab.reference)],
            "continued exactly",
            "run folder",
            like="other",
        ),
        Fault(6, "damaged cache", [Attempt(before=flip_a_bit_of_the_cache)], "continued exactly", "run folder"),
        Fault(
            7,
            "a process hangs",
            [Attempt("--num-processes 2 --process-timeout 0.1", during=stop_a_rank)],
            "stopped",
            r"rank 1 of 2 was stopped \(SIGSTOP\)",
        ),
        Fault(
            8,
            "disk full at a checkpoint",
            [Attempt(inside=NO_ROOM_FOR_CHECKPOINTS)],
            "continued exactly",
            "no checkpoint at step 20",
        ),
        Fault(8, "disk full at metrics", [Attempt(inside=NO_ROOM_FOR_METRICS)], "continued exactly", "until there is"),
        Fault(
            9,
            "killed before pictures",
            [Attempt(inside=KILLED_BEFORE_PICTURES), CONTINUE],
            f"killed, {THEN_EXACTLY}",
            "continuing at step 30",
        ),
        Fault(
            10, "damaged line of metrics", [Attempt(before=damage_metrics)], "continued exactly", "line 1 ", begins=10
        ),
        Fault(
            11,
            "damaged config.json",
            [Attempt(before=lambda _, folder: (folder / "config.json").write_text("{"))],
            "continued exactly",
            "is damaged and is written anew",
            begins=10,
        ),
        Fault(11, "folder removed", [Attempt(inside=REMOVE_FOLDER)], "continued exactly", "were removed while"),
        odd_manifest("manifest: a list", replace_manifest("[]\n")),
        odd_manifest("manifest: empty", replace_manifest("")),
        odd_manifest("manifest: nested deeply", replace_manifest("[" * 100_000)),
        odd_manifest("manifest: a path upwards", forge(files={"../../x.safetensors": {"bytes": 1, "sha256": ""}})),
        odd_manifest("manifest: a device", forge(files={"/dev/zero": {"bytes": 1, "sha256": ""}})),
        odd_manifest("manifest: other types", forge(files={"state.json": "whole"}, rows=[])),
        odd_manifest("weights: a link", link_weights),
        Fault(
            13,
            "W&B fails at its start",
            [Attempt("--tracker wandb", env={"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "{server}"})],
            "continued exactly",
            "W&B is offline|W&B is off",
        ),
        *(
            Fault(
                14,
                f"{number.name} while importing",
                [Attempt(inside=SIGNAL_WHILE_IMPORTING.format(number=int(number))), CONTINUE],
                f"stopped, {THEN_EXACTLY}",
                "^stopped by ",
            )
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        ),
        Fault(
            14, "SIGTERM at step 12", [Attempt(inside=TERMINATE), CONTINUE], f"stopped, {THEN_EXACTLY}", "by SIGTERM"
        ),
        Fault(
            15, "out of memory", [Attempt(inside=OUT_OF_MEMORY), CONTINUE], f"refused, {THEN_EXACTLY}", "out of memory"
        ),
        bad_images("label out of range", "holds the label 10 in row 2", 1, 2, 10),
        bad_images("null label", "has the label None in row 1", 1, None, 3),
        bad_images("NaN label", "has the label .* in row 0", 1.0, float("nan"), 3.0),
        bad_images("black image", "all black in row 1", 1, 2, 3, black=[1]),
        bad_images("no rows", "has no rows"),
        Fault(
            16,
            "bit flipped in a listed file",
            [Attempt(BAD_IMAGES, before=flip_a_listed_bit)],
            "refused",
            "does not match its SHA-256 in",
        ),
        Fault(
            16,
            "null activity",
            [Attempt("--data-dir {lab} --dataset hmp", command=f"{ROOT}/recipes/har.py debug", before=null_activity)],
            "refused",
            "has a null in row 1",
        ),
        Fault(
            16,
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
        Fault(17, "tokenizer offline", [Attempt("--tokenizer gpt2", command=MODEL, env=NO_HUB)], "refused", "gpt2"),
        Fault(17, "data set offline", [Attempt("--dataset a/b", command=MODEL, env=NO_HUB)], "refused", "a/b"),
        Fault(
            18,
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sample", type=int, help="only so many faults, spread over the list")
    parser.add_argument("--only", default="", help="only faults whose name holds this")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which is kept")
    args = parser.parse_args(argv)
    chosen = [fault for fault in faults() if args.only in fault.name]
    if args.sample:
        chosen = [chosen[place * len(chosen) // args.sample] for place in range(min(args.sample, len(chosen)))]
    wrong = []
    print(f"| item | fault | what the user sees | exit | verdict |\n{'|---' * 5}|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        if args.keep:
            args.keep.mkdir(parents=True)
        lab = Lab(args.keep or Path(scratch))
        for place, fault in enumerate(chosen):
            every, found = lab.examine(fault, place)
            line = matching(fault, every) or every[0].err.strip().splitlines()[-1:] or [""]
            shown = line if isinstance(line, str) else line[0]
            shown = shown.replace(str(lab.folder), "").replace("|", "/")
            codes = ", ".join(str(seen.code) for seen in every)
            right = found == fault.expected
            if not right:
                wrong.append(fault.name)
                found += f" (expected: {fault.expected})"
            print(f"| {fault.item} | {fault.name} | {shown[:160]} | {codes} | {found} |", flush=True)
    print(f"\n{len(chosen) - len(wrong)} of {len(chosen)} as expected" + (f"; not: {', '.join(wrong)}" * bool(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
