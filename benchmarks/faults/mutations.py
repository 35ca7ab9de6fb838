"""Planted faults in toolkit/, and the tests that catch them.

    python benchmarks/faults/mutations.py                            all mutations, two at a time
    python benchmarks/faults/mutations.py --only NAME ...            some mutations, without a benchmark result
    python benchmarks/faults/mutations.py --tree FOLDER --out FILE   the tests of another checkout

A mutation of `mutations.toml` replaces text in one file. The runner applies it to a copy of the checkout and runs the
test that killed it the last time, by the table in `--last`. If that test passes, the runner goes on with the test files
that cover the changed lines, quick and closely named ones first, until a test fails. Tests that also fail without a
mutation do not count.

The coverage of each test file, with its forks and subprocesses, is measured when a mutation needs it, and kept in
`--map`. A test file is measured again after it, or toolkit/, has changed. Test runs are forks of this process, which
has imported the slow libraries.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import gc
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import coverage
import psutil
import pytest
from hypothesis import Phase, settings

from benchmarks.report import COMMIT, command, machine, markdown, write_report

MAP = ROOT / "build" / "mutations" / "map.json"
LAST = ROOT / "benchmarks" / "results" / "mutations.json"
LIMIT_S = 900
"""Seconds for a test file while coverage is measured; a mutant gets three times the measured seconds, and `EXTRA_S`."""
EXTRA_S = 120
MOST_LOG = 10_000
"""Characters of output that the map keeps of a test file that fails without a mutation."""
PRELOADED = "tests.support.preloaded"
LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.launcher",
    "accelerate",
    "transformers.models.auto.modeling_auto",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.trainer",
    "peft",
    "datasets",
    "matplotlib.figure",
    "networkx",
    "scipy.optimize",
    "sklearn.datasets",
    "tyro",
    "tyro._backends._tyro_backend",
    "beartype",
    "hypothesis",
    "typeguard",
    "wandb",
)
PR_SET_CHILD_SUBREAPER = 36
COVERAGE = """
[run]
core = ctrace
parallel = true
data_file = {data}/coverage
include = {folder}/toolkit/*
concurrency = thread
patch = subprocess, _exit, fork
disable_warnings = {warnings}
"""
WARNINGS = "couldnt-parse,trace-changed,module-not-python,module-not-imported,no-data-collected,module-not-measured"


class Mutation(NamedTuple):
    """A fault in one file."""

    name: str
    path: str
    before: str
    """Text that occurs once in the file."""
    after: str
    fault: str


class Outcome(NamedTuple):
    """A run of one test file."""

    failed: list[str]
    """Ids of the failed tests; the file itself if it ended without a report."""
    seconds: float


def read_mutations(tree: Path) -> list[Mutation]:
    """Read `mutations.toml`. Raises ValueError for a text that does not occur once in `tree`."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    mutations = [Mutation(name, **fields) for name, fields in tables.items()]
    for mutation in mutations:
        if (found := (tree / mutation.path).read_text().count(mutation.before)) != 1:
            raise ValueError(f"{mutation.name}: the text occurs {found} times in {mutation.path}")
        ast.parse(mutated(mutation, tree))
    return mutations


def mutated(mutation: Mutation, tree: Path) -> str:
    return (tree / mutation.path).read_text().replace(mutation.before, mutation.after)


def changed_lines(mutation: Mutation, tree: Path) -> set[int]:
    """Return the lines of the statements that the mutation replaces, without the bodies of compound statements."""
    text = (tree / mutation.path).read_text()
    first = text[: text.index(mutation.before)].count("\n") + 1
    lines = set(range(first, first + len(mutation.before.splitlines())))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            span = range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)
            if lines.intersection(span):
                lines.update(span)
    return lines


# --- test runs ---------------------------------------------------------------------------------------------------


@contextmanager
def copy_of(tree: Path) -> Iterator[Path]:
    """Copy the files that git knows or would add; yields the copy, in a temporary folder of its own."""
    listing = ["git", "-C", str(tree), "ls-files", "--cached", "--others", "--exclude-standard"]
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        folder = Path(scratch) / "tree"
        for name in subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines():
            if (tree / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, folder / name)
        yield folder


class FailedTests:
    """A pytest plugin that writes the ids of failed tests to a file."""

    def __init__(self, path: Path):
        self._path = path

    def pytest_collection(self) -> None:
        """Leave out the search for a smaller example of a failed property."""
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutations", settings.default, phases=phases)
        settings.load_profile("mutations")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def run_tests(folder: Path, test: str, words: Sequence[str], limit_s: float, config: Path | None = None) -> Outcome:
    """Run a test file of the checkout `folder` in a fork, with coverage if there is a `config` for it."""
    begin, scratch = time.monotonic(), Path(tempfile.mkdtemp(dir=folder.parent))
    (ids := scratch / "failed").touch()
    pid = os.fork()
    if pid == 0:
        try:
            become_pytest(folder, [test, f"--basetemp={scratch / 'tmp'}", *words], FailedTests(ids), config)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    status = None
    while status is None and time.monotonic() < begin + limit_s:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = code
        else:
            time.sleep(0.02)
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children)
    failed = ids.read_text().splitlines()
    if status is None:
        failed = failed or [f"{test} (time limit)"]
    elif os.waitstatus_to_exitcode(status) not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        failed = failed or [test]
    shutil.rmtree(scratch, ignore_errors=True)
    return Outcome(failed, round(time.monotonic() - begin, 1))


def become_pytest(folder: Path, words: Sequence[str], plugin: FailedTests, config: Path | None) -> NoReturn:
    """Run pytest in this process, a fork, on the package and tests in `folder`."""
    os.setsid()
    os.chdir(folder)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders belong to the parent
    log = os.open(folder.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(stream, number)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("toolkit", "benchmarks")]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [str(folder), *(path for path in sys.path if str(ROOT) not in path or "site-packages" in path)]
    os.environ["PYTHONPATH"] = str(folder)
    if config is not None:
        coverage.Coverage(config_file=str(config)).start()
    start_fork_server()
    # Libraries with pytest plugins are imported already.
    os._exit(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *words], [plugin]))


def start_fork_server() -> None:
    """Start the fork server of the tests as a fork, with the imported libraries."""

    def fork(_: object, words: Sequence[str], passed: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            first = 3
            for passed_on in sorted(passed):
                os.closerange(first, max(first, passed_on))
                first = max(first, passed_on + 1)
            os.closerange(first, os.sysconf("SC_OPEN_MAX"))
            sys.orig_argv[:] = [sys.executable, *words[1:]]
            try:
                exec(words[-1], {})
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
        return pid

    util.spawnv_passfds = fork  # type: ignore[assignment]
    forkserver.set_forkserver_preload([PRELOADED])
    forkserver.ensure_running()


def in_forks(run: Callable[[Any], Any], items: Sequence[Any], jobs: int) -> Iterator[tuple[Any, Any]]:
    """Yield each item and the JSON value of `run(item)`, called in a fork, as they end."""
    waiting = list(items)[::-1]
    running: dict[int, tuple[Any, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                item = waiting.pop()
                result = Path(folder) / str(len(waiting))
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # for `run_tests` to end all it started
                        result.write_text(json.dumps(run(item)))
                        code = 0
                    except BaseException:
                        sys.excepthook(*sys.exc_info())
                    finally:
                        os._exit(code)
                running[pid] = item, result
            pid, status = os.wait()
            item, result = running.pop(pid)
            if status:
                raise RuntimeError(f"{item}: ended with status {status}")
            yield item, json.loads(result.read_text())


# --- coverage ----------------------------------------------------------------------------------------------------


def test_files(tree: Path, under: Sequence[str]) -> list[str]:
    found = sorted(path.relative_to(tree).as_posix() for path in (tree / "tests").rglob("test_*.py"))
    return [name for name in found if any(Path(name).is_relative_to(folder) for folder in under)]


def measure(tree: Path, test: str) -> dict[str, Any]:
    """Run a test file under coverage; returns its seconds, failed tests, and the lines of toolkit/ that it covers."""
    with copy_of(tree) as folder:
        data, config = folder.parent / "data", folder.parent / "coveragerc"
        data.mkdir()
        config.write_text(COVERAGE.format(data=data, folder=folder, warnings=WARNINGS))
        outcome = run_tests(folder, test, [], LIMIT_S, config)
        lines: dict[str, set[int]] = {}
        for file in data.iterdir():
            found = coverage.CoverageData(str(file))
            try:
                found.read()
            except coverage.CoverageException:  # of a process that was killed
                continue
            for path in found.measured_files():
                lines.setdefault(os.path.relpath(path, folder), set()).update(found.lines(path) or ())
        log = (folder.parent / "log").read_text(errors="replace")[-MOST_LOG:] if outcome.failed else ""
        return {**outcome._asdict(), "log": log, "lines": {path: sorted(of) for path, of in sorted(lines.items())}}


def measured(tree: Path, tests: Sequence[str], path: Path, jobs: int) -> dict[str, Any]:
    """Return the map by test file, after measuring the test files that are new or have changed."""
    sources = hashlib.sha1()
    for source in sorted((tree / "toolkit").rglob("*.py")):
        sources.update(source.read_bytes())
    digests = {test: hashlib.sha1(sources.digest() + (tree / test).read_bytes()).hexdigest() for test in tests}
    kept = json.loads(path.read_text()) if path.exists() else {}
    new = [test for test in tests if kept.get(test, {}).get("digest") != digests[test]]
    path.parent.mkdir(parents=True, exist_ok=True)
    for test, entry in in_forks(lambda test: measure(tree, test), new, jobs):
        kept[test] = {"digest": digests[test], **entry}
        print(f"{entry['seconds']:6.1f} s {test} {' '.join(entry['failed'])}", flush=True)
        path.with_suffix(".new").write_text(json.dumps(kept))
        path.with_suffix(".new").replace(path)
    return {test: kept[test] for test in tests}


# --- mutations ---------------------------------------------------------------------------------------------------


def covering(mutation: Mutation, tree: Path, cover: Mapping[str, Any]) -> list[str]:
    """Return the test files that cover a changed line: closely named ones first, then quick ones."""
    lines, path = changed_lines(mutation, tree), Path(mutation.path)

    def order(test: str) -> tuple[bool, bool, float]:
        name, folders = Path(test).stem, set(Path(test).parts)
        return path.stem not in name, path.parent.name not in folders, cover[test]["seconds"]

    return sorted(
        (test for test, entry in cover.items() if lines & set(entry["lines"].get(mutation.path, ()))), key=order
    )


def run_mutant(mutation: Mutation, tree: Path, tests: Sequence[str], cover: Mapping[str, Any]) -> dict[str, Any]:
    """Run test files or tests on a copy with `mutation` until one fails; returns a row of the table."""
    begin, killed, files = time.monotonic(), [], 0
    with copy_of(tree) as folder:
        (folder / mutation.path).write_text(mutated(mutation, tree))
        for test in tests:
            files += 1
            entry = cover.get(test, {"failed": [], "seconds": EXTRA_S})
            known = [f"--deselect={each}" for each in entry["failed"]]
            limit_s = 3 * entry["seconds"] + EXTRA_S
            killed = run_tests(folder, test, ["-x", *known], limit_s).failed
            if killed and "::" in killed[0]:  # a test may fail because the machine is busy
                killed = run_tests(folder, killed[0], [], limit_s).failed
            if killed:
                break
    return {
        "mutation": mutation.name,
        "path": mutation.path,
        "killed by": killed[0] if killed else None,
        "test files": files,
        "seconds": round(time.monotonic() - begin),
    }


def run_without(tree: Path, test: str) -> list[str]:
    """Run a test on a copy without a mutation; returns the ids of failed tests."""
    with copy_of(tree) as folder:
        return run_tests(folder, test, [], LIMIT_S).failed


def killers(table: Path, tree: Path, names: Collection[str], jobs: int) -> dict[str, str]:
    """Return the test that killed each mutation by the table of an earlier run, if it passes without a mutation."""
    rows = json.loads(table.read_text())["rows"] if table.exists() else []
    tests = {row["mutation"]: row["killed by"] for row in rows if row["killed by"] and row["mutation"] in names}
    passed = {
        test
        for test, failed in in_forks(lambda test: run_without(tree, test), sorted(set(tests.values())), jobs)
        if not failed
    }
    return {name: test for name, test in tests.items() if test in passed}


def import_libraries() -> None:
    """Import the slow libraries, for all forks."""
    for name in LIBRARIES:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if find_spec("transformers"):  # the first call builds a table of all families
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("mixtral")
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of mutations. Default: all")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout with the tests. Default: this one")
    parser.add_argument("--map", type=Path, default=MAP, help="file of the coverage. Default: build/mutations/map.json")
    parser.add_argument(
        "--last", type=Path, default=LAST, help="result of the last run. Default: benchmarks/results/mutations.json"
    )
    parser.add_argument("--out", type=Path, help="file of the result. Default: benchmarks/results/mutations.json")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders and files with tests. Default: tests")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time. Default: %(default)s")
    options = parser.parse_args()
    tree = options.tree.resolve()
    mutations = read_mutations(tree)
    chosen = [each for each in mutations if options.only is None or each.name in options.only]
    import_libraries()
    last = killers(options.last, tree, [each.name for each in chosen], options.jobs)
    found: dict[str, dict[str, Any]] = {}

    def run_all(mutations: Sequence[Mutation], tests_of: Callable[[Mutation], Sequence[str]], cover: Any) -> None:
        runs = in_forks(lambda each: run_mutant(each, tree, tests_of(each), cover), mutations, options.jobs)
        for mutation, row in runs:
            found[mutation.name] = row
            print(f"{row['seconds']:4} s {mutation.name}: {row['killed by'] or 'alive'}", flush=True)

    run_all([each for each in chosen if each.name in last], lambda each: [last[each.name]], {})
    if alive := [each for each in chosen if each.name not in found or found[each.name]["killed by"] is None]:
        cover = measured(tree, test_files(tree, options.tests), options.map.resolve(), options.jobs)
        run_all(alive, lambda each: covering(each, tree, cover), cover)
    rows = [found[each.name] for each in chosen]
    survived = [row["mutation"] for row in rows if row["killed by"] is None]
    facts = {"killed": len(rows) - len(survived), "survived": survived}
    if options.out is not None:
        record = {"command": command(), "commit": COMMIT, **facts, "machine": machine(), "rows": rows}
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    elif options.only is None:
        write_report("mutations", rows, **facts)
    else:
        print(markdown(rows), end="")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
