"""Faults at random moments and places: kills, hangs, full disks, damaged files, signals. Drawn from a seed."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults.lab import IMAGE_FILES, Attempt, Fault, Lab
from benchmarks.faults.server import ROOT, Process

CONTINUE = Attempt()
PHASES = ("start", "data", "step", "callbacks", "evaluation", "checkpoint", "finish")
THEN_EXACTLY = ", then (continued exactly|finished already)"
"""The latter where the fault comes after the last file of the run was written."""
NAMED = "( but for metrics that it names)?"
RUN_S = 2.0
"""About how long a run takes."""


class Draws:
    """Random numbers of one kind of fault."""

    def __init__(self, seed: int, kind: str):
        self._random = random.Random(f"{seed} {kind}")
        self._drawn: set[float] = set()

    def fraction(self) -> float:
        """One that was not drawn before, so that faults have names of their own."""
        while (fraction := round(self._random.random(), 4)) in self._drawn:
            pass
        self._drawn.add(fraction)
        return fraction

    def of(self, *options: str) -> str:
        return self._random.choice(options)

    def rank(self, processes: int) -> int:
        return self._random.randrange(processes)


def planted(fault: str, phase: str, fraction: float, *, rank: int = 0, processes: int = 1) -> str:
    """Python that plants `fault`, a call in `benchmarks.faults.planted`."""
    calls = f"{{lab}}/undisturbed-data-{processes}"
    return (
        "import signal\nfrom benchmarks.faults import planted\n"
        f"planted.at({calls!r}, {phase!r}, {fraction}, planted.{fault}, rank={rank})"
    )


def killed(draws: Draws, phase: str, rank: int = 0, processes: int = 1, *, parent: bool = False) -> tuple[str, Attempt]:
    """A kill at a random moment of `phase`: its name, and the attempt."""
    fraction = draws.fraction()
    who = ("the launcher" if parent else f"rank {rank} of {processes}") + ", " if processes > 1 else ""
    fault = f"signalling(signal.SIGKILL, parent={parent})"
    return f"{who}{phase} {fraction}", Attempt(inside=planted(fault, phase, fraction, rank=rank, processes=processes))


def kills(seed: int) -> Iterator[Fault]:
    kind = "SIGKILL of the run"
    draws = Draws(seed, kind)
    counts = {"start": 30, "data": 10, "step": 40, "callbacks": 20, "evaluation": 30, "checkpoint": 70, "finish": 40}
    for phase, count in counts.items():
        for _ in range(count):
            name, attempt = killed(draws, phase)
            yield Fault(kind, name, [attempt, CONTINUE], "killed" + THEN_EXACTLY)

    kind = "SIGKILL of the run by the clock"
    draws = Draws(seed, kind)
    for _ in range(40):
        after = round(RUN_S * draws.fraction(), 5)
        attempt = Attempt(during=then(after, signal.SIGKILL))
        yield Fault(kind, f"after {after} s", [attempt, CONTINUE], "(killed|continued exactly)" + THEN_EXACTLY)

    kind = "SIGKILL four times in a row"
    draws = Draws(seed, kind)
    for _ in range(20):
        fours = [killed(draws, draws.of(*PHASES)) for _ in range(4)]
        attempts = [*(attempt for _, attempt in fours), CONTINUE]
        expected = "killed(, then (killed|continued exactly|finished already))*" + THEN_EXACTLY
        yield Fault(kind, ", ".join(name for name, _ in fours), attempts, expected, count=4)

    for processes, count in ((2, 70), (4, 24)):
        kind = f"SIGKILL of a rank of {processes}"
        draws = Draws(seed, kind)
        for place in range(count):
            rank = draws.rank(processes)
            name, attempt = killed(draws, PHASES[place % len(PHASES)], rank, processes)
            says = f"rank {rank} of {processes} was ended by SIGKILL"
            yield Fault(kind, name, [attempt, CONTINUE], "stopped" + THEN_EXACTLY, says, processes=processes)

    kind = "SIGKILL of the launcher"
    draws = Draws(seed, kind)
    for place in range(28):
        name, attempt = killed(draws, PHASES[place % len(PHASES)], processes=2, parent=True)
        yield Fault(kind, name, [attempt, CONTINUE], "killed" + THEN_EXACTLY, processes=2)

    kind = "SIGKILL of a rank of 2, --max-restarts 3"
    draws = Draws(seed, kind)
    for place in range(35):
        rank = draws.rank(2)
        name, attempt = killed(draws, PHASES[place % len(PHASES)], rank, 2)
        restarting = Attempt("--max-restarts 3", inside=attempt.inside)
        says = f"^restart 1 of 3 in 1 s: rank {rank} of 2 was ended by SIGKILL|is finished, so it is not started again"
        yield Fault(kind, name, [restarting], "continued exactly", says, processes=2)


def hangs(seed: int) -> Iterator[Fault]:
    for phases, timeout_s, flags in (
        (("data", "step"), 3.0, "--step-timeout 3"),
        (("evaluation", "checkpoint"), 3.0, "--process-timeout 0.05"),
    ):
        kind = f"SIGSTOP of a rank of 2, {flags}"
        draws = Draws(seed, kind)
        for place in range(12):
            rank, phase, fraction = draws.rank(2), phases[place % 2], draws.fraction()
            inside = planted("signalling(signal.SIGSTOP)", phase, fraction, rank=rank, processes=2)
            yield Fault(
                kind,
                f"rank {rank} of 2, {phase} {fraction}",
                [Attempt(flags, inside=inside), CONTINUE],
                "stopped" + THEN_EXACTLY,
                f"rank {rank} of 2 (does not answer|was stopped)",
                processes=2,
                timeout_s=timeout_s,
            )


def disks(seed: int) -> Iterator[Fault]:
    kind = "disk full, and room again"
    draws = Draws(seed, kind)
    for place in range(84):
        phase, fraction = (*PHASES, "checkpoint", "finish")[place % 9], draws.fraction()
        limit, calls = int(draws.of("0", "100", "5000")), int(draws.of("30", "300", "3000", "1000000"))
        inside = planted(f"no_room({limit}, {calls})", phase, fraction)
        yield Fault(
            kind,
            f"{phase} {fraction}, files of {limit} bytes, for {calls} calls",
            [Attempt(inside=inside), CONTINUE],
            "(continued exactly|refused)" + THEN_EXACTLY,
        )

    kind = "read-only folder"
    draws = Draws(seed, kind)
    for place in range(24):
        phase, fraction = PHASES[place % len(PHASES)], draws.fraction()
        inside = planted("read_only('{folder}')", phase, fraction)
        yield Fault(
            kind,
            f"{phase} {fraction}",
            [Attempt(inside=inside), Attempt(before=writable)],
            "(continued exactly|refused)" + THEN_EXACTLY,
            "error: .*: (choose another|make room)|^continuing" if phase != "start" else "",
            begins=10 if phase == "start" else None,
        )


def writable(_: Lab, folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


IN_A_RUN = (
    "config.json",
    "code.txt",
    "metrics.jsonl",
    "checkpoints/step-00000020/manifest.json",
    "checkpoints/step-00000020/state.json",
    "checkpoints/step-00000020/model.safetensors",
    "checkpoints/step-00000020/optimizer.safetensors",
    "checkpoints/step-00000020/experts-00000.safetensors",
    "checkpoints/step-00000010/manifest.json",
    "checkpoints/step-00000010/model.safetensors",
)
IN_A_FINISHED_RUN = (
    "config.json",
    "code.txt",
    "metrics.jsonl",
    "results.json",
    "summary.txt",
    "loss.png",
    "checkpoints/step-00000030/manifest.json",
    "checkpoints/step-00000030/state.json",
    "checkpoints/step-00000030/model.safetensors",
    "checkpoints/step-00000030/optimizer.safetensors",
)
Change = Callable[[bytes], bytes]


def damages(seed: int) -> Iterator[Fault]:
    for kind, each, change in (
        ("bit flipped in a file of a run", 16, flip),
        ("file of a run cut off", 8, cut),
        ("file of a run overwritten by zeros", 3, zero),
    ):
        draws = Draws(seed, kind)
        for file in IN_A_RUN:
            for _ in range(each):
                fraction = draws.fraction()
                refusable = file == "config.json"
                attempts = [Attempt(before=changed(file, change(fraction)))]
                expected = "continued exactly" + NAMED * (file == "metrics.jsonl")
                if refusable:
                    attempts.append(Attempt(before=without("config.json")))
                    expected = "(continued exactly|refused), then continued exactly"
                yield Fault(kind, f"{file} {fraction}", attempts, expected, begins=20, quick=True)
    kind = "file of a run deleted"
    for file in IN_A_RUN:
        expected = "continued exactly" + NAMED * (file == "metrics.jsonl")
        yield Fault(kind, file, [Attempt(before=without(file))], expected, begins=20, quick=True)

    kind = "file of a finished run damaged"
    draws = Draws(seed, kind)
    for file in IN_A_FINISHED_RUN:
        words, second, says = "compare {folder}", "finished", f"{file}: was changed after the run was finished"
        if file.startswith("checkpoints/"):
            folder, _, name = file.rpartition("/")
            words, second, says = f"checkpoint verify {{folder}}/{folder}", "refused", f"{folder} is damaged: {name} "
        told = Attempt(command=f"{ROOT}/toolkit/__main__.py {words}")
        for change in (flip, flip, flip, flip, cut, cut, zero):
            fraction = draws.fraction()
            attempts = [Attempt(before=changed(file, change(fraction))), told]
            expected = f"(refused|finished already), then {second}"
            yield Fault(kind, f"{file} {change.__name__} {fraction}", attempts, expected, says, begins=30)


def flip(fraction: float) -> Change:
    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[int(fraction * len(content))] ^= 1 << int(fraction * 1e4) % 8
        return bytes(changed)

    return change


def cut(fraction: float) -> Change:
    return lambda content: content[: int(fraction * len(content))]


def zero(fraction: float) -> Change:
    def change(content: bytes) -> bytes:
        begin = int(fraction * len(content))
        return content[:begin] + bytes(len(content[begin : begin + 512])) + content[begin + 512 :]

    return change


def changed(file: str, change: Change) -> Callable[[Lab, Path], None]:
    def write(_: Lab, folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(change(content))

    return write


def without(file: str) -> Callable[[Lab, Path], None]:
    return lambda _, folder: (folder / file).unlink(missing_ok=True)


def data(seed: int) -> Iterator[Fault]:
    """Data of their own, because other runs read the common ones."""
    kind = "data file removed or damaged"
    draws = Draws(seed, kind)
    place = 0
    for name in IMAGE_FILES:
        for what, change in (("gone", None), ("flip", flip), ("flip", flip), ("flip", flip), ("cut", cut)):
            fraction = draws.fraction()
            mine = f"data_{place}"
            place += 1
            attempts = [
                Attempt(data=mine, before=damaged_data(mine, name, change and change(fraction))),
                Attempt(data=mine, before=whole_data(mine)),
            ]
            # A bit in a file's description, such as who wrote it, may not matter.
            expected = "(refused|continued exactly)" if what == "flip" else "refused"
            yield Fault(kind, f"{name} {what} {fraction}", attempts, expected + THEN_EXACTLY, begins=10)
        for phase in ("data", "step", "evaluation", "checkpoint"):
            fraction = draws.fraction()
            mine = f"data_{place}"
            place += 1
            inside = planted(f"remove('{{lab}}/{mine}/mnist/{name}')", phase, fraction)
            attempts = [Attempt(data=mine, inside=inside, before=whole_data(mine))]
            yield Fault(kind, f"{name} gone in {phase} {fraction}", attempts, "continued exactly")


def whole_data(name: str) -> Callable[[Lab, Path], None]:
    def write(lab: Lab, _: Path) -> None:
        shutil.rmtree(lab.folder / name, ignore_errors=True)
        shutil.copytree(lab.folder / "data", lab.folder / name)

    return write


def damaged_data(name: str, file: str, change: Change | None) -> Callable[[Lab, Path], None]:
    def write(lab: Lab, folder: Path) -> None:
        whole_data(name)(lab, folder)
        path = lab.folder / name / "mnist" / file
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()))

    return write


def others(seed: int) -> Iterator[Fault]:
    kind = "W&B killed"
    draws = Draws(seed, kind)
    for place in range(15):
        phase, fraction = ("data", "step", "evaluation", "checkpoint", "finish")[place % 5], draws.fraction()
        attempt = Attempt(
            "--tracker wandb", inside=planted("kill_wandb", phase, fraction), env={"WANDB_MODE": "offline"}
        )
        yield Fault(kind, f"{phase} {fraction}", [attempt], "continued exactly", "W&B is (off|offline)")

    kind = "two runs on one folder"
    draws = Draws(seed, kind)
    for _ in range(40):
        after = round(0.5 * RUN_S * draws.fraction(), 5)
        expected = "continued exactly, then (refused|finished already)"
        yield Fault(
            kind, f"the second after {after} s", [Attempt(during=then(after))], expected, "--run-dir", twice=True
        )

    kind = "run stopped by a signal"
    draws = Draws(seed, kind)
    for place in range(56):
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)[place % 4]
        phase, fraction = PHASES[place % len(PHASES)], draws.fraction()
        attempt = Attempt(inside=planted(f"signalling(signal.{number.name})", phase, fraction))
        # Before training nothing is to be saved, and the signal does what it does to any program: Python answers Ctrl-C
        # with a traceback until `run_recipe` is called.
        ended = f"|ended with -{number.value}" + "|traceback" * (number == signal.SIGINT) if phase == "start" else ""
        expected = f"(stopped|continued exactly{ended}){THEN_EXACTLY}"
        yield Fault(kind, f"{number.name}, {phase} {fraction}", [attempt, CONTINUE], expected, stops=True)


def then(seconds: float, number: signal.Signals | None = None) -> Callable[[Process, Path], None]:
    """Wait, and send a signal."""

    def do(process: Process, _: Path) -> None:
        time.sleep(seconds)
        if number is not None and process.poll() is None:
            process.send_signal(number)

    return do


def every_fault(seed: int) -> list[Fault]:
    """All of them, in the order of the table."""
    return [fault for kind in (kills, hangs, disks, damages, data, others) for fault in kind(seed)]
