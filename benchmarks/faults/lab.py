"""Runs that faults happen to, in a temporary folder: what a user sees of each, and the verdict."""

from __future__ import annotations

import http.server
import io
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.faults.server import ROOT, STACKS, Process, Server
from benchmarks.same_numbers import differences, environment, read_records
from toolkit.experts.state import manifest
from toolkit.run.tracking.jsonl import read_metrics

RECIPE = f"{ROOT}/recipes/mnist_moe.py"
EVERY, STEPS = 10, 30
FLAGS = f"debug --cpu --epochs 6 --log-every 5 --checkpoint.every-steps {EVERY} --checkpoint.keep 9"
"""30 steps, three checkpoints."""
SPREAD = "--num-processes {processes} --replan.planner swap --replan.every 7 --replan.no-guarded"
"""On several processes: experts are moved while it trains."""
TIME_LIMIT_S = 120
"""After which a run hangs."""
GRACE_S = 10.0
"""How long after a run its processes may still be there."""
NAMED_WITHIN_S = 10.0
"""How long after its timeout a process that hangs may be named."""
NOT_COME = "the fault did not come"
IMAGE_FILES = [f"{split}-00000-of-00001.parquet" for split in ("train", "test")]
FAULT = re.compile(
    r"^fault: (?P<name>\w+) in the phase (?P<phase>\w+) after step (?P<step>\d+) at (?P<at>[\d.]+) s$", re.MULTILINE
)
"""What a planted fault writes to stderr when it comes."""


@dataclass(frozen=True)
class Attempt:
    """One command."""

    flags: str = ""
    """Here, in `inside`, `env` and `command` {lab} is the folder of everything, and {folder} that of the run."""
    inside: str = ""
    """Python that is run in the process before the recipe."""
    before: Callable[[Lab, Path], object] | None = None
    """What is done to the run's folder first."""
    during: Callable[[Process, Path], object] | None = None
    """What is done to the process while it runs."""
    after: Callable[[Lab, Path], str | None] | None = None
    """Looks at the run's folder for what must not be there."""
    env: Mapping[str, str] = field(default_factory=dict)
    data: str = "data"
    """The folder of the images."""
    command: str = ""
    """The words of a command that does not train on images."""
    anew: bool = False
    """In a process that imports its libraries itself."""
    draws: bool = False
    """Whether it really draws its pictures."""


@dataclass(frozen=True)
class Fault:
    """A fault, and what a user should see of it."""

    kind: str
    """A line of the table."""
    name: str
    attempts: Sequence[Attempt]
    expected: str
    """A regular expression that the verdict matches."""
    says: str = ""
    """A regular expression that a line for the user matches, in one of the attempts."""
    begins: int | None = None
    """Begin in the folder of a run that was killed after the checkpoint of this step, or finished after the last."""
    like: str = "data"
    """The images of the run to compare with."""
    processes: int = 1
    count: int = 1
    """How many faults these are."""
    twice: bool = False
    """Whether the first attempt is started a second time while it runs."""
    stops: bool = False
    """Whether a planted fault has to end the first attempt, unless it comes in the last step or after it."""
    timeout_s: float | None = None
    """Of a process that hangs, which has to be named `NAMED_WITHIN_S` later."""
    quick: bool = False
    """Whether it takes the time of one short run: a sample has more of these."""


@dataclass(frozen=True)
class Seen:
    """What a user sees of an attempt."""

    code: int | None
    """None where it did not end."""
    out: str
    err: str
    seconds: float = 0.0
    ended: float = 0.0
    """On the clock of `time.monotonic`."""

    @property
    def after_fault_s(self) -> float:
        """Seconds between a planted fault and the end; 0 where none came."""
        came = FAULT.search(self.err)
        return self.ended - float(came["at"]) if came else 0.0


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
    """A folder with data, runs and a cache. Several threads may use it, each with a server of its own."""

    def __init__(self, folder: Path, *, keeps: bool = False):
        self.folder, self.keeps = folder, keeps
        folder.chmod(0o755)  # some faults make a process that of another user
        self._lock = threading.RLock()
        self._undisturbed: dict[tuple[str, int], Path] = {}
        self._failing: str | None = None
        write_images(folder / "data" / "mnist", seed=0)
        write_images(folder / "other" / "mnist", seed=1)
        for path in (folder / "data" / "mnist").iterdir():
            times = path.stat()
            os.utime(folder / "other" / "mnist" / path.name, ns=(times.st_atime_ns, times.st_mtime_ns))

    def undisturbed(self, server: Server, data: str = "data", processes: int = 1) -> Path:
        """The folder of a run that nothing happened to, in which the calls of each phase are counted."""
        with self._lock:
            if (data, processes) not in self._undisturbed:
                folder = self.folder / f"undisturbed-{data}-{processes}"
                env = {"TOOLKIT_CACHE_DIR": str(self.folder / f"{data}_cache")} if data != "data" else {}
                inside = f"from benchmarks.faults import planted; planted.count({str(folder)!r})"
                if data == "data" and processes == 1:  # the first one prepares the data, which are more calls
                    self.run(server, Attempt(), self.folder / "first")
                seen = self.run(server, Attempt(data=data, env=env, inside=inside, draws=True), folder, processes)
                if seen.code:
                    raise SystemExit(f"error: a run that nothing happened to ends with {seen.code}: {seen.err}")
                self._undisturbed[data, processes] = folder
            return self._undisturbed[data, processes]

    @property
    def failing_server(self) -> str:
        """The address of a W&B server that answers to be there, and then fails."""
        with self._lock:
            if self._failing is None:
                server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
                threading.Thread(target=server.serve_forever, daemon=True).start()
                self._failing = f"http://127.0.0.1:{server.server_port}"
            return self._failing

    def start(self, server: Server, attempt: Attempt, folder: Path, processes: int = 1) -> Process:
        words = attempt.command or f"{RECIPE} {FLAGS} --dataset auto"
        if processes > 1:
            words += " " + SPREAD.format(processes=processes)
        if "{folder}" not in words:
            words += " --run-dir {folder} " + attempt.flags
            if "--tracker" not in words:
                words += " --tracker none"
        env = environment(ROOT, self.folder / "cache") | {"TOOLKIT_DATA_DIR": "{lab}/" + attempt.data, **attempt.env}
        if "{server}" in env.values():
            env |= {name: self.failing_server for name, value in env.items() if value == "{server}"}

        def filled(text: str) -> str:
            return text.replace("{lab}", str(self.folder)).replace("{folder}", str(folder))

        env = {name: filled(value) for name, value in env.items()}
        inside = filled(attempt.inside)
        if not attempt.draws and not attempt.anew:
            inside = f"from benchmarks.faults import planted\nplanted.blank_pictures()\n{inside}"
        return server.start(filled(words).split(), env, self.folder, inside, anew=attempt.anew)

    def run(self, server: Server, attempt: Attempt, folder: Path, processes: int = 1) -> Seen:
        began = time.monotonic()
        process = self.start(server, attempt, folder, processes)
        if attempt.during is not None:
            attempt.during(process, folder)
        return end(process, began)

    def earlier_run(self, server: Server, step: int, folder: Path, processes: int = 1) -> None:
        """Make `folder` what a run leaves that was killed after the checkpoint of `step`, or has finished after it."""
        shutil.copytree(self.undisturbed(server, processes=processes), folder)
        for path in folder.glob("calls-*"):
            path.unlink()
        if step == STEPS:
            return
        for path in folder.iterdir():
            if path.suffix == ".png" or path.name in ("results.json", "summary.txt"):
                path.unlink()
        for path in (folder / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)

    def examine(self, server: Server, fault: Fault, folder: Path) -> tuple[list[Seen], str]:
        """What a user sees of `fault`, and the verdict."""
        self.undisturbed(server)  # fills the cache
        reference = self.undisturbed(server, fault.like, fault.processes)
        if fault.begins is not None:
            self.earlier_run(server, fault.begins, folder, fault.processes)
        every: list[Seen] = []
        verdicts = []
        for attempt in fault.attempts:
            if attempt.before is not None:
                attempt.before(self, folder)
            kept = newest_intact(folder)
            examined = len(every)
            if fault.twice and not every:
                every += self.run_twice(server, attempt, folder)
            else:
                every.append(self.run(server, attempt, folder, fault.processes))
            if "planted.at(" in attempt.inside and len(every) == 1 and not FAULT.search(every[0].err):
                verdicts.append(NOT_COME)
            found = attempt.after(self, folder) if attempt.after is not None else None
            for seen in every[examined:]:
                compared = None if attempt.command else reference
                verdicts.append(found or (compared and lost(seen, kept)) or verdict(seen, folder, compared))
        if fault.stops and went_on(every[0]):
            verdicts[0] = "went on"
        if fault.twice:
            verdicts.sort()
        if left := server.left_behind(GRACE_S):
            verdicts.append(f"left {len(left)} process(es) behind ({left[0]})")
        if fault.timeout_s is not None and every[0].after_fault_s > fault.timeout_s + NAMED_WITHIN_S:
            verdicts.append(f"named after {every[0].after_fault_s:.0f} s")
        if matching(fault, every) is None:
            verdicts.append("silent")
        return every, ", then ".join(verdicts)

    def run_twice(self, server: Server, attempt: Attempt, folder: Path) -> list[Seen]:
        """The same command two times at once; `during` waits in between."""
        began = time.monotonic()
        first = self.start(server, attempt, folder)
        assert attempt.during is not None
        attempt.during(first, folder)
        second = self.start(server, attempt, folder)
        return [end(first, began), end(second, began)]


def end(process: Process, began: float) -> Seen:
    code = process.wait(TIME_LIMIT_S)
    if code is None:
        for hanging in (*psutil.Process(process.pid).children(), process):
            hanging.send_signal(STACKS)
        time.sleep(1)
        process.send_signal(signal.SIGKILL)  # its ranks end with it
        process.wait(10)
    ended = time.monotonic()
    out, err = process.output()
    return Seen(code, out, err, ended - began, ended)


def newest_intact(folder: Path) -> int:
    """The step of the newest checkpoint in which every byte is as it was written, or 0."""
    found = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    return next((int(path.name.removeprefix("step-")) for path in found if manifest.find_damage(path) is None), 0)


def lost(seen: Seen, kept: int) -> str | None:
    """What was lost beyond the last checkpoint, by a run that began with one of step `kept`; None for nothing."""
    if seen.code:
        return None
    begun = re.search(r"^continuing at step ([\d,]+)", seen.out, re.MULTILINE)
    step = int(begun[1].replace(",", "")) if begun else 0
    return f"began at step {step} with a checkpoint of step {kept}" if step < kept else None


def verdict(seen: Seen, folder: Path, reference: Path | None) -> str:
    """The verdict on an attempt, which is compared with the run in `reference`, if any."""
    lines = [line for line in seen.err.strip().splitlines() if not FAULT.match(line)]
    if seen.code is None:
        return "hung"
    if "Traceback" in seen.err:
        return "traceback"
    if seen.code == 2:
        if "holds a finished run" in seen.err and reference is not None and not unlike(reference, folder):
            return "finished already"
        return "refused" if len(lines) == 1 else f"refused in {len(lines)} lines"
    if seen.code in (75, 130, 1) and lines:
        return "stopped"
    if seen.code == -signal.SIGKILL:
        came = FAULT.search(seen.err)
        if came and int(came["step"]) - newest_intact(folder) > EVERY:
            return f"killed after step {came['step']}, the newest checkpoint is of {newest_intact(folder)}"
        return "killed"
    if seen.code:
        return f"ended with {seen.code}"
    if reference is None:
        return "finished"
    if not (found := unlike(reference, folder)):
        return "continued exactly"
    if "metrics.jsonl: line" in seen.out and not unlike(reference, folder, metrics=False):
        return "continued exactly but for metrics that it names"
    return f"continued otherwise ({found[0]})"


def went_on(seen: Seen) -> bool:
    """Whether an attempt ended as if no fault had come, which one did before its last step."""
    came = FAULT.search(seen.err)
    return seen.code == 0 and came is not None and int(came["step"]) < STEPS - 1


def unlike(reference: Path, folder: Path, *, metrics: bool = True) -> list[str]:
    """What differs between two finished runs: metrics, results, or the last weights. Restarts do not count."""
    try:
        return _unlike(reference, folder, metrics=metrics)
    except (OSError, ValueError, KeyError) as error:  # damaged by the fault
        return [f"cannot be compared: {error}"]


def _unlike(reference: Path, folder: Path, *, metrics: bool) -> list[str]:
    pictures = {path.name for path in reference.glob("*.png")} - {path.name for path in folder.glob("*.png")}
    found = [f"no {name}" for name in sorted(pictures)]
    found += unlike_metrics(reference / "metrics.jsonl", folder / "metrics.jsonl") if metrics else []
    results = [{k: v for k, v in each.items() if k != "restarts"} for each in read_records(folder / "results.json")]
    found += differences(read_records(reference / "results.json"), results, {})
    if digests(reference) != digests(folder):
        found.append("other weights")
    return found


def unlike_metrics(reference: Path, path: Path) -> list[str]:
    """What differs between two files of metrics, but for lines that cannot be read."""
    before = read_records(reference)
    restarts = [line for line in read_metrics(path) if "run/restarts" in line]
    lines = {line["step"]: line for line in read_metrics(path) if line not in restarts}
    unreadable = len(path.read_bytes().splitlines()) - len(lines) - len(restarts)
    expected = [line for line in before if line["step"] in lines]
    found = list(differences(expected, list(lines.values()), {}))
    if len(before) - len(expected) != unreadable:
        found.append(f"{len(expected)} of {len(before)} lines of metrics")
    return found


def digests(folder: Path) -> dict[str, str]:
    """Of the weights and optimizer states in the last checkpoint; none where there is no checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*"), default=None)
    files = {} if newest is None else manifest.read_manifest(newest)["files"]
    return {name: about["sha256"] for name, about in files.items() if name.endswith(".safetensors")}


def matching(fault: Fault, every: Sequence[Seen]) -> str | None:
    """The line that tells the user of `fault`; empty where none has to."""
    if not fault.says:
        return ""
    lines = [line for seen in every for line in (seen.out + "\n" + seen.err).splitlines()]
    return next((line for line in lines if re.search(fault.says, line)), None)


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path: Path, **columns: Any) -> None:
    """Write columns with checksums, as publishers of data sets do."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, write_page_checksum=True)


def write_images(folder: Path, seed: int, train: int = 320) -> None:
    """A random set in the files of MNIST's publishers."""
    draws = np.random.default_rng(seed)
    for file, count in zip(IMAGE_FILES, (train, 64), strict=True):
        images = draws.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = draws.integers(0, 10, count)
        write_parquet(folder / file, image=[{"bytes": png(image), "path": None} for image in images], label=labels)
