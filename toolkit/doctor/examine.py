"""Run a script in one process and in several, compare, and report the findings."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.doctor.causes import CHAIN, RATE, Finding, diagnose, out_of_step, recomputed_otherwise, unrepeatable
from toolkit.doctor.compare import TOLERANCES, Check, Comparison, Evidence
from toolkit.doctor.record import read_records
from toolkit.doctor.recorder import SPLIT_NOTE, Variant
from toolkit.errors import UserError, last_line
from toolkit.progress_bar import progress
from toolkit.run.console import describe_processes
from toolkit.run.launch.world import without_launcher

SUSPICIOUS = 1e-2
"""No rounding makes a difference as large as this in a few steps."""


WAITED = re.compile(r"gloo|[Tt]imed out waiting|Connection (closed|reset) by peer")
"""Pattern in the error of a rank whose collective failed because of another rank."""
MOST_WAIT_S = 30.0
"""Timeout of a collective, in addition to twice the duration of the run in one process."""


GRACE_S = 5.0
"""Seconds for other ranks to end once one has failed."""
POLL_S = 0.05


class ScriptFailed(Exception):
    """A script ended with an error, which is the text; `finding` is its diagnosis, if any."""

    def __init__(self, error: str, finding: Finding | None = None):
        super().__init__(error)
        self.finding = finding


@dataclass(frozen=True)
class Report:
    """Result of the doctor."""

    script: str
    processes: int
    steps: int
    """Optimizer steps that were compared."""
    tolerance: float
    checks: list[Check]
    findings: list[Finding]
    """Likeliest cause first."""
    notes: list[str]

    @property
    def ok(self) -> bool:
        return not self.findings and all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON; infinity is "inf"."""
        checks = [
            vars(check) | {"worst": check.worst if check.worst < float("inf") else "inf", "ok": check.ok}
            for check in self.checks
        ]
        return vars(self) | {"ok": self.ok, "checks": checks, "findings": [vars(finding) for finding in self.findings]}

    def __str__(self) -> str:
        worlds = f"in one process and in {self.processes}"
        lines = [f"{self.script}: {self.steps} optimizer steps {worlds}, relative tolerance {self.tolerance:g}", ""]
        for check in self.checks:
            step = f"step {check.step}" if check.step else ""
            place = ", ".join(part for part in (step, check.place) if part) if check.worst else ""
            difference = (
                "equal" if check.worst == 0 else "differs" if check.worst == float("inf") else f"{check.worst:.1e}"
            )
            lines.append(f"  {'ok   ' if check.ok else 'WRONG'} {check.quantity:27} {difference:8} {place}".rstrip())
        if self.notes:
            lines += ["", *(f"note: {note}." for note in self.notes)]
        for number, finding in enumerate(self.findings):
            lines += [
                "",
                f"{'likely cause' if number == 0 else 'also'}: {finding.name}",
                f"  seen     {finding.symptom}",
                f"  because  {finding.cause}",
                f"  remedy   {finding.remedy}",
            ]
        verdict = "healthy: both learn the same." if self.ok else "not healthy: see above."
        return "\n".join([*lines, "", verdict, ""])


def examine(
    script: Path,
    args: Sequence[str] = (),
    *,
    processes: int = 2,
    steps: int = 3,
    tolerance: float | None = None,
    timeout_s: float = 600,
    log: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare training of `script` in one process and in `processes`.

    Args:
        script: The Python file to run.
        args: Command-line arguments of the script.
        processes: World size to compare with one process.
        steps: Optimizer steps of each run.
        tolerance: Relative difference that counts as rounding. Default: by the script's precision.
        timeout_s: Timeout of each run, in seconds.
        log: Called with a line for each run.

    Raises:
        UserError: If the script cannot be run, or does not train with Accelerate.
    """
    if any(word.partition("=")[0] in ("--num-processes", "--num_processes") for word in args):
        raise UserError("--num-processes: is set by the doctor. Use its --processes, before the script.")
    with tempfile.TemporaryDirectory(prefix="toolkit-doctor-") as folder:
        took_s: dict[int, float] = {}

        def run(name: str, world: int, variant: Variant = "as it is") -> Evidence:
            started = time.monotonic()
            log(f"{name}: {describe_processes(world)}, {steps} steps ...")
            where = Path(folder) / name.replace(" ", "-")
            wait_s = MOST_WAIT_S + 2 * took_s.get(1, 0.0)
            evidence = _run(script, args, world, steps, where, timeout_s, wait_s, variant)
            took_s[world] = time.monotonic() - started
            log(f"{name}: done in {took_s[world]:.0f} s")
            return evidence

        try:
            one = run("alone", 1)
        except ScriptFailed as error:
            raise UserError(f"{script} fails in one process: {error}") from None
        limit = TOLERANCES[one.first.precision] if tolerance is None else tolerance
        notes = list(one.first.notes)
        try:
            many = run("together", processes)
        except ScriptFailed as error:
            if error.finding is not None:
                return Report(str(script), processes, 0, limit, [], [error.finding], notes)
            raise UserError(f"{script} runs in one process and fails in {processes}: {error}") from None
        comparison, findings = judge(one, many, limit, run)
    notes = list(dict.fromkeys([*notes, *comparison.many.first.notes]))
    if comparison.rounding is not None:
        notes.append("limits come from one process with perturbed weights: rounding errors grow here")
    if comparison.steps < steps:
        notes.append(f"the script ended after {comparison.steps} step(s)")
    return Report(str(script), processes, comparison.steps, limit, comparison.checks, findings, notes)


def judge(
    one: Evidence, many: Evidence, tolerance: float, run: Callable[[str, int, Variant], Evidence]
) -> tuple[Comparison, list[Finding]]:
    """Compare two runs, and explain differences.

    If something differs, `run` (name, processes, variant) runs the script again: with a scheduler that makes a step for
    each process, if learning rates differ first; in one process, to see whether it repeats itself; and in one process
    with perturbed weights, to see the effect of rounding.
    """
    comparison = Comparison(one, many, tolerance)
    if SPLIT_NOTE in many.first.notes and _first_finding(comparison) == RATE:
        stepped = run("together, stepped for each process", len(many.records), "stepped for each process")
        if _first_finding(Comparison(one, stepped, tolerance)) != RATE:
            many, comparison = stepped, Comparison(one, stepped, tolerance)
    if all(comparison[quantity].ok for quantity in CHAIN):
        return comparison, diagnose(comparison)
    again = Comparison(one, run("alone again", 1, "as it is"), tolerance)
    if differing := [quantity for quantity in CHAIN if not again[quantity].ok]:
        symptom = f"in one process, run twice, it differs in {', '.join(differing)}"
        return comparison, [unrepeatable(symptom), *diagnose(comparison)]
    if diagnose(comparison) and max(comparison[quantity].worst for quantity in CHAIN) < SUSPICIOUS:
        rounding = Comparison(one, run("alone, perturbed", 1, "perturbed"), tolerance)
        comparison = Comparison(one, many, tolerance, rounding)
    return comparison, diagnose(comparison)


def _first_finding(comparison: Comparison) -> str | None:
    return next((finding.name for finding in diagnose(comparison)), None)


def _run(
    script: Path,
    args: Sequence[str],
    world: int,
    steps: int,
    folder: Path,
    timeout_s: float,
    wait_s: float,
    variant: Variant,
) -> Evidence:
    """Run `script` under the recorder as the ranks of one world; raises ScriptFailed with the last line of an error."""
    folder.mkdir()
    environment = without_launcher(os.environ) | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        # A mode that the script gives itself counts more than the variable: its runs go with the folder.
        "WANDB_MODE": "disabled",
        "WANDB_DIR": str(folder),
    }
    watched = [str(folder), str(steps), variant, str(wait_s), str(script), *args]
    command = [sys.executable, "-m", f"{__package__}.watch", *watched, *_recipe_flags(script, args, folder)]
    codes = _run_ranks(command, environment, world, folder, timeout_s)
    if any(code != 0 for code in codes):
        raise _failure(folder, codes, timeout_s)
    evidence = Evidence(read_records(folder))
    if len(evidence.records) < world or not evidence.steps:
        raise UserError(
            f"{script}: the doctor saw no optimizer step. Use a model prepared by an Accelerator, "
            "accelerator.backward, and a torch optimizer."
        )
    return evidence


def _run_ranks(
    command: Sequence[str], environment: Mapping[str, str], world: int, folder: Path, timeout_s: float
) -> list[int | None]:
    """Run `command` as each rank of one world; returns the exit codes, None for a rank that was still running.

    After the first failure the others have `GRACE_S` to end.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with socket.socket() as reserved:  # rank 0 can listen on its port, and no other process is given it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        size = str(world)
        shared = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(reserved.getsockname()[1]),
        }
        try:
            for rank in range(world):
                place = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
                with (folder / f"output{rank}.txt").open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            command,
                            env={**environment, **place},
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            ends = time.monotonic() + timeout_s
            with progress(timeout_s, "running", bar_format="{desc} {elapsed}", miniters=0) as bar:
                while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < ends:
                    if any(codes):
                        ends = min(ends, time.monotonic() + GRACE_S)
                    time.sleep(POLL_S)
                    bar.update(0)
            return codes
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _failure(folder: Path, codes: list[int | None], timeout_s: float) -> ScriptFailed:
    """Return why ranks failed, by their exit codes; None for ranks that were still running."""
    errors = {rank: last_line(folder / f"output{rank}.txt") for rank, code in enumerate(codes) if code}
    for error in errors.values():
        if "CheckpointError" in error:
            return ScriptFailed(error, recomputed_otherwise(error))
    for error in errors.values():
        if not WAITED.search(error):
            return ScriptFailed(error)
    late = f"no end within {timeout_s:g} s; see --timeout."
    if len(codes) == 1:
        return ScriptFailed(late)
    places = [folder / f"place{rank}.txt" for rank in range(len(codes))]
    said = [place.read_text() if place.exists() else "before its first step" for place in places]
    each = "; ".join(f"rank {rank} {place}" for rank, place in enumerate(said))
    return ScriptFailed(late, out_of_step(f"processes waited for each other in vain: {each}"))


def _recipe_flags(script: Path, args: Sequence[str], folder: Path) -> list[str]:
    """Return flags that keep a recipe of this toolkit from writing to the user's runs, and from resuming one."""
    if "run_recipe(" not in script.read_text(encoding="utf-8", errors="replace"):
        return []
    flags = {"--run-dir": str(folder / "run"), "--tracker": "none", "--resume": "no"}
    given = {word.partition("=")[0].replace("_", "-") for word in args}
    return [word for flag, value in flags.items() if flag not in given for word in (flag, value)]
