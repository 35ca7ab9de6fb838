"""Check that the results of runs are bitwise identical to an older revision.

    python benchmarks/same_numbers.py --against main~3 --jobs 2            ten minutes of processor time
    python benchmarks/same_numbers.py --against main~3 --keep FOLDER       keep the results of the older revision
    python benchmarks/same_numbers.py --record FOLDER                      compare with kept results in half the time

Every configuration runs in a temporary git worktree of the revision and in this tree, with the same seed, offline, on
the CPU with one thread per process: the `debug` preset of every recipe on one and two processes, experts that are
moved, replicated, grown, merged and pruned, other balancing methods, dropped tokens, and an example without the
toolkit's trainer. Each tree imports its own toolkit. metrics.jsonl and results.json are compared line by line. Prints
a row for each configuration; exit code 1 if any differs or fails.

RENAMED_FLAGS and RENAMED_KEYS map names between the trees. A key of only one tree is a difference unless ADDED lists
it. Times, memory and git revisions are not compared (`may_differ`). Kept results can only be compared on the same
machine, because processors round differently.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import machine

RENAMED_FLAGS: dict[str, str] = {}
"""Words of this tree's command lines, including recipe files, mapped to zero or more words of the older revision."""
RENAMED_KEYS: dict[str, str] = {}
"""Regular expressions for keys of the older revision's results, mapped to this tree's keys; the first match counts.

Keys are from metrics.jsonl and results.json; nested keys are joined: `expert_placement/block`.
"""

CORRECTED: dict[str, str] = {r"moe/rank_imbalance_bound": "removed with the bounds of planners"}
"""Regular expressions for keys with wrong older values, and a description: not compared."""

ADDED: dict[str, str] = {
    r"hardware": "the machine of the run, formerly in code.txt",
    r"moe/rank_load/.*": "rows per rank",
    r"placement_before_moves.*": "the placement before the first move",
}
"""Regular expressions for keys of only this tree, and a description: not compared."""

SHOWN = 12
"""Maximum number of listed differences per configuration."""

RECIPES = ("mnist_moe", "lm_moe", "finetune_moe", "few_labels", "har", "psmnist", "vae_robustness", "lmu_speech")
EXPERT_RECIPES = ("mnist_moe", "lm_moe")
MOVED = "--replan.planner swap --replan.every 10 --replan.no-guarded"
"""Without the guard, which compares times and is not deterministic."""
DYNAMIC = (
    "--max-experts 8 --epochs 6 --lr 1e-2 --blank-pixels 0.9 --lifecycle.plateau-threshold 0 "
    "--lifecycle.check-every 1 --lifecycle.check-samples 36 --lifecycle.cooldown-checks 4 "
    "--lifecycle.sleep-every 14 --lifecycle.min-sleep-every 9 "
    "--lifecycle.memory-size 40 --lifecycle.replay-steps 2 --lifecycle.replay-lr 1e-2 --lifecycle.undo-above "
    "0.1 --lifecycle.prune-below 0.8 --lifecycle.min-age 12 --lifecycle.merge-distance 0.95 "
    "--lifecycle.merge-similarity 0.1"
)
"""138 steps with a merge, a prune, nine sleeps and an undone change; with `--experts 8` also with growth."""
EXAMPLE = """
import json, pathlib, runpy, sys
path, folder = sys.argv[1:]
after = runpy.run_path(path)
if after["accelerator"].is_main_process:
    results = {"loss": after["loss"].item(), "moved": len(after["experts"].migrations)}
    results["weights"] = sorted(p.double().square().sum().item() for p in after["model"].parameters())
    pathlib.Path(folder, "results.json").write_text(json.dumps(results))
"""
"""Runs the example and writes its last loss, the number of migrations, and the sum of squares of each parameter of
rank 0."""


@dataclass(frozen=True)
class Configuration:
    """A run in both trees."""

    name: str
    words: tuple[str, ...]
    """Arguments of python with this tree's names; FOLDER stands for the run directory."""

    @property
    def folder_name(self) -> str:
        return re.sub(r"\W+", "_", self.name)

    def command(self, folder: Path, renamed: Mapping[str, str]) -> list[str]:
        words = [word for given in self.words for word in (renamed[given].split() if given in renamed else [given])]
        return [sys.executable, *(word.replace("FOLDER", str(folder)) for word in words)]


def recipe_run(recipe: str, processes: int, title: str = "", flags: str = "") -> Configuration:
    always = f"debug --cpu --tracker none --seed 0 --num-processes {processes} --run-dir FOLDER"
    name = ", ".join(filter(None, (recipe, title, f"{processes} process{'es' * (processes > 1)}")))
    return Configuration(name, (f"recipes/{recipe}.py", *always.split(), *flags.split()))


CONFIGURATIONS = [
    *(recipe_run(recipe, processes) for recipe in RECIPES for processes in (1, 2)),
    *(recipe_run(recipe, 2, "experts moved", MOVED) for recipe in EXPERT_RECIPES),
    *(recipe_run("mnist_moe", processes, "dynamic experts", DYNAMIC) for processes in (1, 2)),
    recipe_run("mnist_moe", 2, "eight dynamic experts", f"{DYNAMIC} --experts 8"),
    recipe_run("mnist_moe", 2, "balanced by a bias", "--balance bias"),
    recipe_run("mnist_moe", 2, "tokens dropped", "--capacity-factor 1"),
    recipe_run(
        *("mnist_moe", 2, "experts replicated"),
        "--replan.planner replicate --spare-slots 1 --replan.every 10 --replan.no-guarded",
    ),
    Configuration(
        "plain_accelerate, 2 processes",
        (
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"),
            *(sys.executable, "-c", EXAMPLE, "docs/examples/plain_accelerate.py", "FOLDER"),
        ),
    ),
]


# --- comparing ---------------------------------------------------------------------------------------------------


def may_differ(key: str) -> bool:
    """Return whether a value can differ: time, memory, code revision, corrected or new keys."""
    last = key.rpartition("/")[2]
    return (
        key.startswith("perf/")
        or last.endswith(("_seconds", "_per_second", "_ms", "_at"))
        or last in ("peak_memory_bytes", "git_revision", "straggler_notice")
        or any(re.fullmatch(pattern, key) for pattern in (*CORRECTED, *ADDED))
    )


def flat(record: Mapping[str, Any], renamed: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Return the values to compare, as JSON, which is exact and tells 0.0 from -0.0; nested keys are joined with /."""
    values: dict[str, str] = {}
    for name, value in record.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            values |= flat(value, renamed, f"{key}/")
            continue
        for pattern, now in renamed.items():
            if matched := re.fullmatch(pattern, key):
                key = matched.expand(now)
                break
        if not may_differ(key):
            values[key] = json.dumps(value)
    return values


def differences(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], renamed: Mapping[str, str]
) -> Iterator[str]:
    """Return the differences between the log steps of two runs: first keys that only one run has, then by line."""
    if len(before) != len(now):
        yield f"{len(before)} lines before, {len(now)} now"
    pairs = [(flat(old, renamed), flat(new, {})) for old, new in zip(before, now, strict=False)]
    yield from one_sided("before", ({*old} - {*new} for old, new in pairs))
    yield from one_sided("now", ({*new} - {*old} for old, new in pairs))
    for (old, new), line in zip(pairs, now, strict=False):
        place = f"step {line['step']}: " if "step" in line else ""
        for key in old:
            if key in new and old[key] != new[key]:
                yield f"{place}{key}: {shortened(old[key])} before, {shortened(new[key])} now"


def one_sided(side: str, keys: Iterable[set[str]]) -> Iterator[str]:
    if found := set[str]().union(*keys):
        yield f"only {side}: {', '.join(sorted(found))}"


def shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def compare_runs(before: Path, now: Path, renamed: Mapping[str, str]) -> list[str]:
    """Return all differences between the results in two folders; empty if there are none."""
    for side, folder in (("before", before), ("now", now)):
        if not folder.is_dir():
            return [f"no record of {side}"]
        if (folder / "error.txt").exists():
            return [f"did not run {side}: {(folder / 'error.txt').read_text().strip()}"]
    found: list[str] = []
    for name in ("metrics.jsonl", "results.json"):
        found += differences(read_records(before / name), read_records(now / name), renamed)
    return found


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the log steps, or the single results object; empty if the run wrote no file."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]


# --- running -----------------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """Check out a temporary worktree of the revision."""
    git("worktree", "add", "--detach", str(folder), revision)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def environment(tree: Path, cache: Path) -> dict[str, str]:
    """Return the environment of a run in `tree`, whose toolkit precedes an installed one, with its own data cache."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOOLKIT_", "ACCELERATE_", "WANDB_"))}
    return kept | {
        "PYTHONPATH": str(tree),
        "TOOLKIT_CACHE_DIR": str(cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }


def check_import(tree: Path, cache: Path) -> None:
    """Raise SystemExit unless runs in `tree` import the toolkit of `tree`."""
    words = [sys.executable, "-c", "import toolkit; print(toolkit.__file__)"]
    done = subprocess.run(words, cwd=cache.parent, env=environment(tree, cache), capture_output=True, text=True)
    if not Path(done.stdout.strip() or "/").is_relative_to(tree):
        raise SystemExit(f"error: runs in {tree} import another toolkit: {done.stdout}{done.stderr}")


def run(configuration: Configuration, tree: Path, record: Path, renamed: Mapping[str, str]) -> None:
    """Run in `tree`, and copy metrics.jsonl and results.json, or write error.txt, to a folder of `record`."""
    kept = record / configuration.folder_name
    kept.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            configuration.command(Path(folder), renamed),
            cwd=tree,
            env=environment(tree, record / "cache"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        for name in ("metrics.jsonl", "results.json"):
            if (written := Path(folder, name)).exists():
                shutil.copy(written, kept / name)
    if done.returncode or not (kept / "results.json").exists():
        last = (done.stderr.strip() or "no results").splitlines()[-1]
        (kept / "error.txt").write_text(f"exit code {done.returncode}: {last}\n")


def run_all(
    configurations: Sequence[Configuration], trees: Mapping[Path, tuple[Path, Mapping[str, str]]], jobs: int
) -> None:
    """Run the configurations in every tree, with its folder and renamed words from `trees`."""
    for tree, (record, _) in trees.items():
        (record / "cache").mkdir(parents=True)
        check_import(tree, record / "cache")
    with ThreadPoolExecutor(jobs) as pool:
        running = [
            pool.submit(run, configuration, tree, record, renamed)
            for configuration in configurations
            for tree, (record, renamed) in trees.items()
        ]
        for each in running:
            each.result()
    for record, _ in trees.values():
        shutil.rmtree(record / "cache")


def rounding_environment() -> dict[str, Any]:
    """Return the environment that affects rounding."""
    here = machine()
    return {name: here[name] for name in ("processor", "torch", "python")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--against", metavar="REVISION", help="older revision, run on this machine")
    source.add_argument("--record", type=Path, metavar="FOLDER", help="results of an older revision, from --keep")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new folder for the results of the older revision")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs. Default: 1")
    parser.add_argument("--only", default="", metavar="WORDS", help="only configurations with WORDS in their name")
    options = parser.parse_args()
    chosen = [configuration for configuration in CONFIGURATIONS if options.only in configuration.name]
    if not chosen:
        names = "; ".join(each.name for each in CONFIGURATIONS)
        parser.error(f"--only {options.only}: no such configuration. Choose from: {names}")
    if options.keep and (options.record or options.keep.exists()):
        parser.error("--keep: needs --against and a new folder")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    if options.record and not (options.record / "record.json").exists():
        parser.error(f"--record {options.record}: has no record.json. Create it with --against and --keep.")

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        now, before = work / "now", options.record or options.keep or work / "before"
        here: dict[Path, tuple[Path, Mapping[str, str]]] = {ROOT: (now, {})}
        if options.record:
            record = json.loads((before / "record.json").read_text())
            if record["machine"] != rounding_environment():
                parser.error(f"--record: created on another machine, {record['machine']}, not {rounding_environment()}")
            run_all(chosen, here, options.jobs)
        else:
            record = {"revision": git("rev-parse", f"{options.against}^{{commit}}"), "machine": rounding_environment()}
            with checked_out(record["revision"], work / "tree") as tree:
                run_all(chosen, {tree: (before.resolve(), RENAMED_FLAGS)} | here, options.jobs)
            (before / "record.json").write_text(json.dumps(record, indent=2) + "\n")

        print(f"this tree against {record['revision']}\n\n| configuration | numbers |\n|---|---|")
        differing: dict[str, list[str]] = {}
        for configuration in chosen:
            found = compare_runs(before / configuration.folder_name, now / configuration.folder_name, RENAMED_KEYS)
            print(f"| {configuration.name} | {shortened(found[0], 100) if found else 'equal'} |")
            if found:
                differing[configuration.name] = found
    print(f"\n{len(chosen) - len(differing)} of {len(chosen)} equal")
    for name, found in differing.items():
        print(f"\n{name}: {len(found)} found" + "".join(f"\n  {each}" for each in found[:SHOWN]))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
