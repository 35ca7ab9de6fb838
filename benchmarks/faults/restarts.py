"""A rank that is killed at a random step of a run with `--max-restarts`: how the run ends, and the time until its next
step. Its processes import their libraries themselves."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.faults.lab import STEPS, Attempt, Lab, unlike
from benchmarks.faults.server import Server
from benchmarks.report import write_report

RANKS = 2
MOMENTS = ("killed", "started", "imported", "begun", "restored", "stepped")
"""What is noted of a restart, in its order: the kill, and when the new first rank was started, had its libraries, began
to train, had its checkpoint, and had done a step."""


def began() -> float:
    """When this process was started, to a hundredth of a second: psutil's time of it has a second's error."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def plant(notes: str, rank: int, step: int) -> None:
    """Have `rank` killed in the step after `step`, and note the moments of the restart in the file `notes`."""
    from toolkit.run.launch.restarts import past_restarts
    from toolkit.train.callbacks.checkpointing import Checkpointing
    from toolkit.train.trainer import Trainer

    if "RANK" not in os.environ:
        return
    mine = int(os.environ["RANK"])
    imported = time.time()

    def note(moment: str, at: float) -> None:
        with open(notes, "a") as file:
            file.write(f"{moment} {at}\n")

    enter, fit, train_step, on_fit_start = Trainer.enter, Trainer.fit, Trainer.train_step, Checkpointing.on_fit_start

    def killing(self: Trainer, phase: str) -> None:
        enter(self, phase)
        if phase == "step" and self.state.step == step and mine == rank:
            note("killed", time.time())
            os.kill(os.getpid(), signal.SIGKILL)

    def noting_fit(self: Trainer) -> dict[str, object]:
        note("started", began())
        note("imported", imported)
        note("begun", time.time())
        return fit(self)

    def noting_restore(self: Checkpointing, trainer: Trainer) -> None:
        on_fit_start(self, trainer)
        note("restored", time.time())

    def noting_step(self: Trainer, micro_batches: Sequence[object]) -> None:
        train_step(self, micro_batches)  # type: ignore[arg-type]
        Trainer.train_step = train_step  # type: ignore[method-assign]
        note("stepped", time.time())

    if not past_restarts():
        Trainer.enter = killing  # type: ignore[method-assign]
    elif mine == 0:
        Trainer.fit = noting_fit  # type: ignore[method-assign]
        Checkpointing.on_fit_start = noting_restore  # type: ignore[method-assign]
        Trainer.train_step = noting_step  # type: ignore[method-assign]


def measure(count: int, seed: int) -> int:
    """Kill a rank in each of `count` runs, one run at a time; writes the record, returns the exit code."""
    draws = random.Random(seed)
    lasted: dict[str, list[float]] = {}
    exact = 0
    with tempfile.TemporaryDirectory() as scratch:
        lab, server = Lab(Path(scratch)), Server()
        reference = lab.undisturbed(server, processes=RANKS)
        for place in range(count):
            rank, step = draws.randrange(RANKS), draws.randrange(1, STEPS)
            folder, notes = lab.folder / f"run-{place}", lab.folder / f"notes-{place}"
            inside = f"from benchmarks.faults import restarts; restarts.plant({str(notes)!r}, {rank}, {step})"
            seen = lab.run(server, Attempt("--max-restarts 3", inside=inside, anew=True), folder, RANKS)
            moments = {moment: float(at) for moment, at in map(str.split, notes.read_text().splitlines())}
            between = {f"{one} to {other}": moments[other] - moments[one] for one, other in pairwise(MOMENTS)}
            between["killed to stepped"] = moments["stepped"] - moments["killed"]
            for name, seconds in between.items():
                lasted.setdefault(name, []).append(seconds)
            found = [f"ended with {seen.code}: {seen.err}"] if seen.code else unlike(reference, folder)
            found += server.left_behind(10.0)
            exact += not found
            verdict = "; ".join(found) or "the weights of the undisturbed run"
            print(f"rank {rank} killed in step {step + 1}: {between['killed to stepped']:.1f} s; {verdict}", flush=True)
        server.close()
    rows = [
        {
            "from": name.partition(" to ")[0],
            "to": name.partition(" to ")[2],
            "median seconds": round(statistics.median(seconds), 2),
            "most seconds": round(max(seconds), 2),
        }
        for name, seconds in lasted.items()
    ]
    write_report("faults_restarts", rows, kills=count, exact=exact, seed=seed, ranks=RANKS)
    return 0 if exact == count else 1
