"""Injects faults into small runs, and shows what a user sees of each. Nothing is silent: a run is refused or stopped in
one line, or it goes on exactly, from its last checkpoint at the latest; it does not hang, and leaves no process behind.

    python benchmarks/faults/inject.py                  all of them, more than 1,000: a quarter of an hour on two cores
    python benchmarks/faults/inject.py --sample 60      some of each kind
    python benchmarks/faults/inject.py --only SIGSTOP   those whose kind or name holds a word
    python benchmarks/faults/inject.py --done FILE      goes on where it was stopped
    python benchmarks/faults/inject.py --restarts 50    killed ranks under --max-restarts, and the time to the next step

Every run is `debug` of a recipe, on made-up images, beside one that nothing happened to. Most are forks of a process
that has imported their libraries. Faults come at random moments, drawn from `--seed`. Verdicts of an attempt:

    refused              exit code 2 and one line
    stopped              exit code 75, 130 or 1, and no traceback
    killed               ended by SIGKILL, which is the fault
    continued exactly    exit code 0; metrics, results and weights are those of the run that nothing happened to
    finished already     exit code 2: the folder holds the finished run, which is the one that nothing happened to
    finished             exit code 0, where there is nothing to compare with

A fault of several attempts has a verdict for each. "silent" is a run that did not say what it should. Exit code 1 where
any verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
PAGE = ROOT / "docs" / "operate" / "checkpoints_and_tracking.md"

from benchmarks.faults import messages, restarts
from benchmarks.faults.cases import every_fault
from benchmarks.faults.lab import NOT_COME, Fault, Lab, matching
from benchmarks.faults.server import Server
from benchmarks.report import markdown, put_tables, write_report

ATTEMPTS = 3
"""At a fault that does not come: a run makes now more, now fewer calls, because some are repeated until others are
done."""


@dataclass(frozen=True)
class Result:
    """What became of a fault."""

    kind: str
    name: str
    count: int
    """Of faults that came: 0 where none did in `ATTEMPTS` attempts, because the end of a run makes fewer calls now."""
    verdict: str
    expected: bool
    codes: list[int | None]
    line: str
    seconds: float
    """Of the first attempt, from a planted fault to the end."""


def faults(seed: int) -> list[Fault]:
    """Every fault, in the order of the table."""
    return [*every_fault(seed), *messages.faults()]


def sample(chosen: Sequence[Fault], count: int) -> list[Fault]:
    """`count` of them: one of each kind, and the others evenly from the quick ones."""
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in chosen:
        kinds[fault.kind].append(fault)
    of_each = [each[len(each) // 2] for each in kinds.values()][:count]
    left = [fault for fault in chosen if fault not in of_each]
    quick = [fault for fault in left if fault.quick]
    more = count - len(of_each)
    if more > len(quick):
        quick = left
    return of_each + [quick[place * len(quick) // more] for place in range(min(more, len(quick)))]


def inject(lab: Lab, chosen: Sequence[Fault], jobs: int) -> Iterator[Result]:
    """The result of each fault, as soon as it is there; `jobs` at a time."""
    waiting: queue.SimpleQueue[tuple[int, Fault]] = queue.SimpleQueue()
    results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
    for place, fault in enumerate(chosen):
        waiting.put((place, fault))

    def work() -> None:
        server = Server()
        try:
            while True:
                place, fault = waiting.get_nowait()
                try:
                    results.put(examine(lab, server, fault, lab.folder / f"run-{place}"))
                except Exception as error:
                    error.add_note(f"with the fault {fault.kind!r}, {fault.name!r}")
                    raise
        except queue.Empty:
            pass
        except BaseException as error:
            results.put(error)
        finally:
            server.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(chosen)))]
    for thread in threads:
        thread.start()
    for _ in chosen:
        if isinstance(result := results.get(), BaseException):
            raise result
        yield result
    for thread in threads:
        thread.join()


def examine(lab: Lab, server: Server, fault: Fault, folder: Path) -> Result:
    """Inject `fault` into a run in `folder`."""
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        every, found = lab.examine(server, fault, folder)
        if NOT_COME not in found:
            break
    came = NOT_COME not in found
    right = not came or re.fullmatch(fault.expected, found) is not None
    if not right:
        for seen in every:
            sys.stderr.write(f"--- {fault.kind}, {fault.name}: {found}\n{seen.out[-3000:]}\n{seen.err[-6000:]}\n")
    line = matching(fault, every) or (every[0].err.strip().splitlines() or [""])[-1]
    shown = line.replace(str(lab.folder), "").replace("|", "/")[:160]
    if right and not lab.keeps:
        shutil.rmtree(folder, ignore_errors=True)
    codes = [seen.code for seen in every]
    count = max(1, codes.count(-signal.SIGKILL)) if fault.count > 1 else 1  # a later kill may not have come
    return Result(
        fault.kind, fault.name, count if came else 0, found, right, codes, shown, round(every[0].after_fault_s, 2)
    )


def table(results: Sequence[Result]) -> list[dict[str, object]]:
    """A row for each kind, in the order of the list, with the number of faults of each verdict."""
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.count:
            kinds[result.kind].append(result)
    rows: list[dict[str, object]] = []
    for kind, each in kinds.items():
        verdicts: dict[str, int] = defaultdict(int)
        for result in each:
            verdicts[result.verdict] += result.count
        total = sum(result.count for result in each)
        as_expected = sum(result.count for result in each if result.expected)
        shown = "; ".join(f"{verdict}: {count}" for verdict, count in sorted(verdicts.items()))
        rows.append({"kind": kind, "faults": total, "as expected": as_expected, "verdicts": shown})
    return rows


def record(
    results: Sequence[Result], everything: Sequence[Fault], *, jobs: int, seed: int, began: float | None
) -> None:
    """Write the record, and the table of the documentation."""
    order = {fault.kind: place for place, fault in enumerate(everything)}
    rows = table(sorted(results, key=lambda result: order[result.kind]))
    write_report(
        "faults",
        rows,
        faults=sum(result.count for result in results),
        unexpected=sum(result.count for result in results if not result.expected),
        did_not_come=sum(result.count == 0 for result in results),
        longest_seconds_from_a_hang_to_the_end=max(
            result.seconds for result in results if result.kind.startswith("SIGSTOP")
        ),
        minutes=None if began is None else round((time.monotonic() - began) / 60, 1),
        jobs=jobs,
        seed=seed,
    )
    shown = [{name: row[name] for name in ("kind", "faults", "as expected")} for row in rows]
    put_tables(PAGE, "faults/inject.py", "<!-- figures: faults.json by kind -->\n" + markdown(shown))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sample", type=int, help="only so many faults, some of each kind")
    parser.add_argument("--only", default="", help="only faults whose kind or name holds this")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places of faults")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which is kept")
    parser.add_argument("--done", type=Path, help="a file of results: faults that it has are not injected again")
    parser.add_argument("--restarts", type=int, help="only a rank that is killed under --max-restarts, so many times")
    args = parser.parse_args(argv)
    if args.restarts:
        return restarts.measure(args.restarts, args.seed)
    everything = faults(args.seed)
    chosen = [fault for fault in everything if args.only in f"{fault.kind} {fault.name}"]
    if args.sample:
        chosen = sample(chosen, args.sample)
    results: list[Result] = []
    if args.done and args.done.exists():
        results = [Result(**json.loads(line)) for line in args.done.read_text().splitlines()]
    known = {(result.kind, result.name) for result in results}
    left = [fault for fault in chosen if (fault.kind, fault.name) not in known]
    random.Random(args.seed).shuffle(left)  # so that what is wrong with a kind is seen early
    began = time.monotonic()
    print(f"| kind | fault | what the user sees | exit | verdict |\n{'|---' * 5}|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        if args.keep:
            args.keep.mkdir(parents=True)
        lab = Lab(args.keep or Path(scratch), keeps=args.keep is not None)
        for result in inject(lab, left, args.jobs):
            results.append(result)
            codes = ", ".join(map(str, result.codes))
            shown = result.verdict if result.expected else f"{result.verdict} (NOT EXPECTED)"
            print(f"| {result.kind} | {result.name} | {result.line} | {codes} | {shown} |", flush=True)
            if args.done:
                with args.done.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    wrong = [f"{result.kind}: {result.name}" for result in results if not result.expected]
    print(f"\n{len(results) - len(wrong)} of {len(results)} as expected" + f"; not: {'; '.join(wrong)}" * bool(wrong))
    if len(results) == len(everything):
        record(results, everything, jobs=args.jobs, seed=args.seed, began=None if known else began)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
