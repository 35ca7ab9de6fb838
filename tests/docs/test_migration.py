"""The pages that say where a guide's flags went name flags that exist.

A code span that begins with `--`, or with a preset, has flags of ours, unless it stands in the first column of a table,
which is the guide's. They belong to a recipe that the page names, as `recipes/<name>.py`. Whole commands have to be
understood.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import ROOT
from toolkit.commands import COMMANDS
from toolkit.run import cli
from toolkit.run.config.flags import flags_of

PAGES = sorted((ROOT / "docs" / "start" / "migration").glob("*.md"))
COMMAND = re.compile(r"(?:python|toolkit run) recipes/(\w+)\.py([^`\n]*)")


def recipes_of(text: str) -> dict[str, Any]:
    """The recipe modules that a page names."""
    return {
        name: importlib.import_module(f"recipes.{name}") for name in re.findall(r"(?<!tests/)recipes/(\w+)\.py", text)
    }


def flags_of_recipe(recipe: Any) -> set[str]:
    return set(flags_of(type(next(iter(recipe.PRESETS.values()))())))


def flags_of_commands(text: str) -> set[str]:
    """Of the parts of our command line that a page names as `toolkit <name>`."""
    found: set[str] = set()
    for name in set(re.findall(r"\btoolkit (\w+)", text)):
        if name in COMMANDS:
            written = io.StringIO()
            with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
                importlib.import_module(COMMANDS[name].module).main(["--help"])
            found |= set(re.findall(r"--[a-z][\w-]*", written.getvalue()))
    return found


def our_flags(text: str, presets: Collection[str] = ()) -> list[str]:
    """The flags in code spans that begin with one, or with a preset; not in the first column of a table."""
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
def test_flags_named_as_ours_exist_in_a_recipe_that_the_page_names(page: Path):
    text = page.read_text()
    recipes = recipes_of(text).values()
    known = {flag for recipe in recipes for flag in flags_of_recipe(recipe)}
    presets = {preset for recipe in recipes for preset in recipe.PRESETS}
    known |= flags_of_commands(text) | {"--help"}
    unknown = [flag for flag in our_flags(text, presets) if flag not in known]
    assert not unknown, f"{page.name} names {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_understood(page: Path):
    for name, words in COMMAND.findall(page.read_text()):
        recipe = importlib.import_module(f"recipes.{name}")
        arguments = shlex.split(re.sub(r"\s#.*|\\$|\$\w+", "", words).replace("...", ""), comments=True)
        if not any(word.isupper() for word in arguments):  # FOLDER and the like stand for something
            cli.parse(recipe.PRESETS, arguments)


def test_the_index_lists_every_page():
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "start" / "migration" / "README.md").read_text()))
    assert listed == {page.name for page in PAGES} - {"README.md"}
    assert listed
