"""Exit of `toolkit audit` and `toolkit adapter convert` on hostile and damaged files.

    python benchmarks/faults/hostile_files.py                      300 files, about five minutes on one core
    python benchmarks/faults/hostile_files.py --only "pipe|NaN"    attacks whose format or name matches; writes nothing

One file of a healthy checkpoint is damaged at a time: by each attack of `hostile_attacks.py`, and by mutations of
bytes, JSON values and pickle opcodes that a seed draws. The command runs in a fork of a process that has imported all
that it needs, with 1 GiB more address space and ten seconds of processor time. It has to exit with code 2 and one line
on standard error, or to print its usual lines and exit with code 0 or 1. Failures are a traceback, a signal, control
characters, out of memory unless the files are larger than the limit, and a change of any file, of `Path.write_text` or
of attributes of torch. Writes benchmarks/results/hostile_files.json; exit code 1 if there is a failure.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import gc
import hashlib
import io
import os
import pathlib
import pickle
import random
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import Accelerator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.faults.hostile_attacks import FORMATS, Attack, Format
from benchmarks.faults.planted_adapters import save_adapters
from benchmarks.report import markdown, write_report
from benchmarks.support.families import model_of, tokens
from toolkit import experts
from toolkit.commands import main as toolkit
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

SPACE, SECONDS, WALL_SECONDS = 2**30, 10, 120
"""Limits of a command. The last one ends a command that waits, such as for a pipe."""
METADATA = dcp.metadata
WATCHED: tuple[Any, ...] = (builtins, os, io, pickle, pathlib, torch, torch.serialization, METADATA)
WATCHED += (torch.Size, OrderedDict, pathlib.Path, pathlib.PosixPath, dcp.filesystem._StorageInfo)
WATCHED += tuple(each for each in vars(METADATA).values() if isinstance(each, type))
"""Modules and classes whose attributes a command must not change."""


class Case(NamedTuple):
    """A file that an attack damages."""

    format: Format
    name: str
    attack: Attack
    command: str


class Ended(NamedTuple):
    """A command that ended, and why it failed, empty if it did not."""

    code: int
    seconds: float
    failure: str


def make_checkpoints(place: Path) -> None:
    """Save a small model in each format, and adapters of its experts."""
    model = model_of("mixtral")
    model.save_pretrained(place / "model", max_shard_size="40KB")
    for folder in ("bin", "pt", "dcp"):
        (place / folder).mkdir()
        shutil.copy(place / "model" / "config.json", place / folder)
    torch.save(model.state_dict(), place / "bin" / "pytorch_model.bin")
    torch.save(model.state_dict(), place / "pt" / "model.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=place / "dcp", no_dist=True)
    save_adapters(place / "model", place / "adapters")
    optimizer = torch.optim.AdamW(model.parameters())
    with contextlib.redirect_stdout(io.StringIO()):  # a summary of the experts
        model, optimizer = ExpertParallel(Accelerator(cpu=True)).prepare(model, optimizer)
    ids = tokens(0, samples=64)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    experts.save(place / "run", model, optimizer)


def cases(seed: int) -> Iterator[Case]:
    for each in FORMATS:
        attacks = {**each.attacks} | {f"mutation {number}": each.mutation for number in range(each.mutations)}
        for number, (name, attack) in enumerate(attacks.items()):
            yield Case(each, name, attack, each.commands[(number + seed) % len(each.commands)])


def words_of(command: str, made: Path, folder: Path, file: str) -> list[str]:
    names = {"made": made, "folder": folder, "file": folder / file, "target": folder.parent / "target"}
    return [word.format(**names) for word in command.split()]


def require_healthy(made: Path, around: Path) -> None:
    """Run each command once without damage, which also imports everything before the forks."""
    for each in FORMATS:
        source, file = each.file.split("/")
        for number, command in enumerate(each.commands):
            folder = around / f"{source} {number}" / "case"
            shutil.copytree(made / source, folder, dirs_exist_ok=True)
            shutil.rmtree(folder.parent / "target", ignore_errors=True)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                code = toolkit(words_of(command, made, folder, file))
            assert code == 0, said.getvalue()


def files_below(place: Path) -> dict[str, tuple[int, int, int, str]]:
    """Return mode, size, time and, if it is small, digest of each file."""
    found = {}
    for path in place.rglob("*"):
        status = path.lstat()
        is_small = stat.S_ISREG(status.st_mode) and status.st_size < 2**20
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_small else ""
        size_and_time = (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
        found[str(path)] = (status.st_mode, *size_and_time, digest)
    return found


def changed_attributes(before: list[dict[str, Any]]) -> list[str]:
    found = []
    for owner, then in zip(WATCHED, before, strict=True):
        now = vars(owner)
        names = {name for name, value in then.items() if name not in now or now[name] is not value}
        if isinstance(owner, type):
            names |= now.keys() - then.keys()  # modules import others when they are used
        found += [f"{owner.__name__}.{name}" for name in sorted(names)]
    return found


def become_command(words: list[str], place: Path, output: Path) -> NoReturn:
    """Run the command in this process, a fork, and write `output / "canary"` after it."""
    code = 1
    try:
        os.chdir(place / "work")
        tempfile.tempdir = str(place / "work")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        before = [dict(vars(owner)) for owner in WATCHED]
        space = SPACE + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(WALL_SECONDS)
        code = toolkit(words)
        (output / "canary").write_text(" ".join(changed_attributes(before)))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def failure_of(code: int, output: Path, is_audit: bool, size: int) -> str:
    """Return why the exit of a command is none that a user should see, or an empty string."""
    said, error = ((output / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    if code < 0:
        return f"{signal.Signals(-code).name} {error[-200:]}"
    if "Traceback (" in error:
        return error[-600:]
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said + error):
        return "control characters"
    if not (output / "canary").exists():
        return "Path.write_text does not write to its path"
    if attributes := (output / "canary").read_text():
        return f"changed: {attributes}"
    lines = said.rstrip("\n").split("\n")
    if code == 2:
        if "out of memory" in error and size < SPACE:
            return "out of memory"
        return "" if re.fullmatch("error: .+\n", error) and not said else f"not one line: {said}{error}"
    if is_audit:
        has_findings = any(line.startswith("finding  ") for line in lines)
        is_valid = all(re.match("ok       |finding  ", line) for line in lines) and code == has_findings
    else:
        is_valid = code == 0 and len(lines) == 1 and "bitwise equal" in said
    return "" if is_valid and lines else f"no result: {code} {said}{error}"


def run(case: Case, made: Path, around: Path, seed: int) -> Ended:
    place, output = around / "place", around / "output"
    for folder in (place / "work", place / "sibling", output):
        folder.mkdir(parents=True)
    (place / "sibling" / "text").write_text("unchanged")
    source, file = case.format.file.split("/")
    folder = place / "case"
    shutil.copytree(made / source, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that torch does not recommend
        case.attack(folder / file, random.Random(f"{seed} {case.format.name} {case.name}"))
    before = files_below(place) | files_below(made)
    words = words_of(case.command, made, folder, file)
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        become_command(words, place, output)
    _, status, usage = os.wait4(pid, 0)
    code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    failure = failure_of(code, output, words[0] == "audit", size)
    if code == 0 and "convert" in words:
        shutil.rmtree(place / "target")
    after = files_below(place) | files_below(made)
    if changed := [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]:
        failure = f"changed: {changed}"
    if failure:
        print(f"{case.format.name}: {case.name}: {failure}", file=sys.stderr)
    shutil.rmtree(around)
    return Ended(code, seconds, failure)


def row(name: str, ended: list[Ended]) -> dict[str, Any]:
    codes = Counter(each.code for each in ended if not each.failure)
    return {
        "file": name,
        "files": len(ended),
        "exit code 2": codes[2],
        "exit code 1, with findings": codes[1],
        "exit code 0": codes[0],
        "failures": sum(bool(each.failure) for each in ended),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="only attacks that match FORMAT: NAME; writes nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are small, and forks have no threads
    transformers.logging.disable_progress_bar()
    chosen = [case for case in cases(options.seed) if re.search(options.only or "", f"{case.format.name}: {case.name}")]
    if not chosen:
        parser.error(f"--only {options.only}: matches no attack")
    ended: dict[str, list[Ended]] = {}
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_checkpoints(made := Path(folder, "made"))
        require_healthy(made, Path(folder))
        gc.freeze()  # forks do not copy pages of what is imported
        for case in chosen:
            ended.setdefault(case.format.name, []).append(run(case, made, Path(folder, "around"), options.seed))
    rows = [row(name, of) for name, of in ended.items()]
    everything = [each for of in ended.values() for each in of]
    total = row("all", everything)
    if options.only:
        print(markdown([*rows, total]), end="")
    else:
        slowest = round(max(each.seconds for each in everything), 1)
        write_report("hostile_files", [*rows, total], seed=options.seed, **{"slowest, s": slowest})
    return int(total["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
