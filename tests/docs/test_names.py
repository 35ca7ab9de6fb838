"""Dotted names and test files that pages, docstrings and messages mention exist."""

import pkgutil
import re
import subprocess

from benchmarks.support.processes import ROOT

HISTORY = "docs/project/notes/"
DOTTED = re.compile(r"(?<![\w./-])(?:toolkit|tk)((?:\.[A-Za-z]\w*)+)")


def exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def missing(text: str) -> list[str]:
    """Return the names below `toolkit` or `tk` in `text` that do not exist."""
    return sorted({name for rest in DOTTED.findall(text) if not exists(name := f"toolkit{rest}")})


def texts() -> list[str]:
    folders = ["toolkit", "recipes", "docs", "README.md", "CONTRIBUTING.md"]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if name.endswith((".py", ".pyi", ".md"))]
    return [name for name in names if not name.startswith(HISTORY)]


def test_mentioned_test_files_exist():
    named = {file for name in texts() for file in re.findall(r"\btests/[\w/]+\.py", (ROOT / name).read_text())}
    assert len(named) > 20
    assert {file for file in named if not (ROOT / file).exists()} == set()


def test_mentioned_names_exist():
    found = {name: missing((ROOT / name).read_text()) for name in texts()}
    assert {name: names for name, names in found.items() if names} == {}
