"""Counts the lines of Python by room, now and at an older revision.

    python benchmarks/lines.py                      this tree
    python benchmarks/lines.py --against 463afd4    beside an older revision, whose files are counted in their new rooms

A room is a folder of `toolkit/`, a folder of `toolkit/experts/`, the recipes or the tests. Files that an older revision
has elsewhere are counted where git finds them now, and those that are gone where `ROOMS_BEFORE` says.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ROOMS_BEFORE = {
    "toolkit/callbacks": "toolkit/train",
    "toolkit/tasks": "toolkit/train",
    "toolkit/models": "toolkit/train",
    "toolkit/standard": "toolkit/train",
    "toolkit/trainer.py": "toolkit/train",
    "toolkit/task.py": "toolkit/train",
    "toolkit/state.py": "toolkit/train",
    "toolkit/metrics.py": "toolkit/train",
    "toolkit/optim.py": "toolkit/train",
    "toolkit/finite_check.py": "toolkit/train",
    "toolkit/batch_size.py": "toolkit/train",
    "toolkit/cli.py": "toolkit/run",
    "toolkit/config": "toolkit/run",
    "toolkit/launch/ray_train.py": "toolkit/commands",
    "toolkit/launch": "toolkit/run",
    "toolkit/tracking": "toolkit/run",
    "toolkit/pictures": "toolkit/run",
    "toolkit/doctor": "toolkit/commands",
    "toolkit/lab": "toolkit/commands",
    "toolkit/report": "toolkit/commands",
    "toolkit/sweep": "toolkit/commands",
    "toolkit/domains": "recipes/subjects",
    "toolkit/placement": "toolkit/experts/placement",
    "toolkit/seeding.py": "toolkit/experts/parallel",
    "toolkit/parallel": "toolkit/experts/parallel",
    "toolkit/moe/lifecycle/callback.py": "toolkit/train",
    "toolkit/moe/lifecycle/report.py": "toolkit/train",
    "toolkit/moe/lifecycle": "toolkit/dynamic",
    "toolkit/moe/load": "toolkit/experts/routing",
    "toolkit/moe/routes.py": "toolkit/experts/routing",
    "toolkit/moe/migrate.py": "toolkit/experts/moving",
    "toolkit/moe/replan.py": "toolkit/experts/moving",
    "toolkit/moe/state_dict.py": "toolkit/experts/state",
    "toolkit/checkpoint/tensor_files.py": "toolkit/experts/state",
    "toolkit/moe": "toolkit/experts/layer",
    "toolkit/hosts": "toolkit/integrations",
}
"""Folders and files of 0.1.0 -> the rooms of 0.2.0; the longest match counts."""


def room(path: str) -> str | None:
    """Returns the room of a file, or None where it is in none that is counted."""
    for length in range(len(path), 0, -1):
        if path[:length] in ROOMS_BEFORE and path[length : length + 1] in ("", "/"):
            return ROOMS_BEFORE[path[:length]]
    parts = path.split("/")
    if parts[:2] == ["toolkit", "experts"]:
        return "/".join(parts[:3]) if len(parts) > 3 else "toolkit/experts"
    if parts[0] == "toolkit":
        return "/".join(parts[:2]) if len(parts) > 2 else "toolkit (root)"
    if parts[0] == "recipes":
        return "recipes/subjects" if len(parts) > 2 else "recipes"
    return parts[0] if parts[0] in ("tests", "benchmarks") else None


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def count(revision: str | None) -> Counter[str]:
    """Returns the lines of Python in each room, in `revision` or, for None, in the working tree."""
    listed = git("ls-files") if revision is None else git("ls-tree", "-r", "--name-only", revision)
    lines: Counter[str] = Counter()
    for path in listed.splitlines():
        if path.endswith((".py", ".pyi")) and (where := room(path)):
            text = (ROOT / path).read_text() if revision is None else git("show", f"{revision}:{path}")
            lines[where] += len(text.splitlines())
    return lines


def total(lines: Counter[str], prefix: str) -> int:
    return sum(number for name, number in lines.items() if name.startswith(prefix))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="an older revision to count as well")
    options = parser.parse_args()
    now, before = count(None), count(options.against) if options.against else Counter[str]()
    rows = [(name, before[name], now[name]) for name in sorted({*now, *before})]
    for name, prefix in (
        ("toolkit in all", "toolkit"),
        ("experts in all", "toolkit/experts"),
        ("recipes in all", "recipes"),
    ):
        rows.append((f"**{name}**", total(before, prefix), total(now, prefix)))
    print("| room | before | now |\n|---|---|---|" if options.against else "| room | lines |\n|---|---|")
    for name, old, new in rows:
        print(f"| {name} | {old:,} | {new:,} |" if options.against else f"| {name} | {new:,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
