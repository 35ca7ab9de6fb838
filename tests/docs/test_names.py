"""The dotted names that docstrings, messages and pages mention are names of modules and of what is in them."""

from __future__ import annotations

import importlib
import re
import subprocess

from tests.support.helpers import ROOT

HISTORY = "docs/project/notes/"
"""Names as they were."""
DOTTED = re.compile(r"(?<![\w./-])(?:toolkit|tk)((?:\.[A-Za-z]\w*)+)")


def exists(name: str) -> bool:
    """Returns whether dotted `name` is a module, or an attribute, of whatever depth, of one."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:depth]))
        except ImportError:
            continue
        for attribute in parts[depth:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def missing(text: str) -> list[str]:
    """The names in `text`, of this package or of its usual short form `tk`, that do not exist."""
    return sorted({name for rest in DOTTED.findall(text) if not exists(name := f"toolkit{rest}")})


def texts() -> list[str]:
    folders = ["toolkit", "recipes", "docs", "README.md", "CONTRIBUTING.md"]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if name.endswith((".py", ".pyi", ".md"))]
    return [name for name in names if not name.startswith(HISTORY)]


def test_a_name_that_does_not_exist_is_found():
    text = "See `toolkit.train.trainer.Trainer.fit`, tk.Run, `toolkit.nowhere.Run`, and `tk.Walk(...)`; toolkit.yaml's."
    assert missing(text) == ["toolkit.Walk", "toolkit.nowhere.Run", "toolkit.yaml"]


def test_tests_that_are_named_exist():
    named = {file for name in texts() for file in re.findall(r"\btests/[\w/]+\.py", (ROOT / name).read_text())}
    assert len(named) > 20
    assert {file for file in named if not (ROOT / file).exists()} == set()


def test_every_text_names_what_exists():
    found = {name: missing((ROOT / name).read_text()) for name in texts()}
    assert {name: names for name, names in found.items() if names} == {}
