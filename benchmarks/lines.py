"""Size of the project: lines by package, and totals that may only fall.

    python benchmarks/lines.py             print lines by package and the totals
    python benchmarks/lines.py --check     compare the totals with benchmarks/totals.json, as `make check` does
    python benchmarks/lines.py --lower     write totals that fell to benchmarks/totals.json

The totals are for the project, not for a file. A change that lowers a total updates the table with `--lower`. A change
that has to raise a total edits the table in the same commit and adds its benefit for users to "raised".
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "totals.json"


def tracked(*patterns: str) -> list[Path]:
    """List the tracked files that match git's `patterns` and exist in the working tree."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", *patterns], capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


def count_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def package(path: Path) -> str:
    """Return the folder that `path` is counted in, for example toolkit/run or toolkit/experts/layer."""
    parts = path.relative_to(ROOT).parts
    depth = {"toolkit": 3 if parts[1] in ("experts", "integrations") else 2}.get(parts[0], 1)
    return "/".join(parts[:-1][:depth])


def is_statement(node: ast.AST) -> bool:
    """Return whether `node` counts as a statement: imports, docstrings and attribute docstrings do not."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)) and not is_text


def recipe_flags() -> int:
    """Count the flags that `python recipes/mnist_moe.py --help all` lists."""
    words = [sys.executable, "recipes/mnist_moe.py", "--help", "all"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return len(set(re.findall(r"^\s*(?:-[a-z], )?(--[a-z][a-z.-]*)", listed, flags=re.MULTILINE)))


def measure() -> dict[str, int]:
    """Return the totals by name."""
    nodes = [node for path in tracked("toolkit/*.py") for node in ast.walk(ast.parse(path.read_text()))]
    return {
        "toolkit: statements": sum(is_statement(node) for node in nodes),
        "toolkit: functions": sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes),
        "toolkit: raise UserError": sum(
            isinstance(node, ast.Raise) and "UserError" in ast.unparse(node) for node in nodes
        ),
        "mnist_moe: flags": recipe_flags(),
        "docs: words": sum(len(path.read_text().split()) for path in tracked("*.md")),
        "tests: lines": count_lines(tracked("tests/*.py")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with code 1 if a total differs from the table")
    parser.add_argument("--lower", action="store_true", help="write totals that fell to the table")
    options = parser.parse_args()
    now, table = measure(), json.loads(TABLE.read_text())
    limits = table["totals"]
    if options.lower:
        table["totals"] = {name: min(total, limits.get(name, total)) for name, total in now.items()}
        TABLE.write_text(json.dumps(table, indent=2) + "\n")
        return 0
    if options.check:
        for name, total in now.items():
            if total > (limit := limits[name]):
                print(f"{name}: {total:,} is more than {limit:,}. Make it smaller, or raise it in {TABLE.name}.")
        risen = any(total > limits[name] for name, total in now.items())
        fallen = [name for name, total in now.items() if total < limits[name]]
        if fallen:
            print(f"{', '.join(fallen)} fell: run python benchmarks/lines.py --lower and commit the table.")
        return int(risen or bool(fallen))
    lines: Counter[str] = Counter()
    for path in tracked("*.py"):
        lines[package(path)] += count_lines([path])
    print(
        "| package | lines |\n|---|---|",
        *(f"| {name} | {number:,} |" for name, number in sorted(lines.items())),
        sep="\n",
    )
    print("\n| total | now | table |\n|---|---|---|")
    print(*(f"| {name} | {total:,} | {limits[name]:,} |" for name, total in now.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
