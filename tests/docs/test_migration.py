"""Flags and commands of the migration guides exist.

Code spans that start with `--` or with a preset contain flags of a recipe that the page names as `recipes/<name>.py`,
or of a `toolkit` command. The first column of tables has flags of the other library.
"""

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Collection
from pathlib import Path

import pytest

from benchmarks.support.processes import ROOT
from toolkit.commands import COMMANDS
from toolkit.run import cli
from toolkit.run.config.flags import flags_of

PAGES = sorted((ROOT / "docs" / "start" / "migration").glob("*.md"))
COMMAND = re.compile(r"(?:python|toolkit run) recipes/(\w+)\.py([^`\n]*)")


def flags_of_commands(text: str) -> set[str]:
    """Return the flags of the commands that a page names as `toolkit <name>`."""
    found: set[str] = set()
    for name in set(re.findall(r"\btoolkit (\w+)", text)):
        if name in COMMANDS:
            written = io.StringIO()
            with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
                importlib.import_module(COMMANDS[name].module).main(["--help"])
            found |= set(re.findall(r"--[a-z][\w-]*", written.getvalue()))
    return found


def documented_flags(text: str, presets: Collection[str]) -> list[str]:
    found = []
    for line in text.splitlines():
        if line.startswith("|"):
            line = line.split("|", 2)[2]
        for span in re.findall(r"`([^`]+)`", line):
            words = span.split()
            if words[0].startswith("--") or words[0] in presets:
                found += [word.partition("=")[0] for word in words if word.startswith("--")]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_flags_and_commands_exist(page: Path):
    text = page.read_text()
    names = re.findall(r"(?<!tests/)recipes/(\w+)\.py", text)
    recipes = [importlib.import_module(f"recipes.{name}") for name in names]
    known = {flag for recipe in recipes for flag in flags_of(type(next(iter(recipe.PRESETS.values()))()))}
    presets = {preset for recipe in recipes for preset in recipe.PRESETS}
    known |= flags_of_commands(text) | {"--help"}
    assert set(documented_flags(text, presets)) <= known
    for name, words in COMMAND.findall(text):
        recipe = importlib.import_module(f"recipes.{name}")
        arguments = shlex.split(re.sub(r"\s#.*|\\$|\$\w+", "", words).replace("...", ""), comments=True)
        if not any(word.isupper() for word in arguments):  # placeholders such as FOLDER
            cli.parse(recipe.PRESETS, arguments)


def test_index_lists_every_page():
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "start" / "migration" / "README.md").read_text()))
    assert listed == {page.name for page in PAGES} - {"README.md"}
    assert listed
