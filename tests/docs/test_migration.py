"""The pages that say where a guide's flags went name flags that exist.

A code span that begins with `--` is a flag of ours, unless it stands in the first column of a table, which is the
guide's. It belongs to a recipe that the page names, as `recipes/<name>.py`. Whole commands have to be understood.
"""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT
from toolkit import cli

PAGES = sorted((ROOT / "docs" / "migration").glob("*.md"))
COMMAND = re.compile(r"(?:python|toolkit run) recipes/(\w+)\.py([^`\n]*)")


def recipes_of(text: str) -> dict[str, Any]:
    """The recipe modules that a page names."""
    return {name: importlib.import_module(f"recipes.{name}") for name in re.findall(r"recipes/(\w+)\.py", text)}


def flags_of(recipe: Any) -> set[str]:
    return set(cli._flags(type(next(iter(recipe.PRESETS.values()))())))


def our_flags(text: str) -> list[str]:
    """The flags in code spans, save those in the first column of a table."""
    found = []
    for line in text.splitlines():
        if line.startswith("|"):
            line = line.split("|", 2)[2]
        found += re.findall(r"`(--[a-z][\w.-]*)", line)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_named_as_ours_exist_in_a_recipe_that_the_page_names(page: Path):
    text = page.read_text()
    known = {flag for recipe in recipes_of(text).values() for flag in flags_of(recipe)}
    unknown = [flag for flag in our_flags(text) if flag not in known]
    assert not unknown, f"{page.name} names {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_understood(page: Path):
    for name, words in COMMAND.findall(page.read_text()):
        recipe = importlib.import_module(f"recipes.{name}")
        arguments = shlex.split(re.sub(r"\s#.*|\\$|\$\w+", "", words).replace("...", ""), comments=True)
        if not any(word.isupper() for word in arguments):  # FOLDER and the like stand for something
            cli.parse(recipe.PRESETS, arguments)


def test_a_flag_that_went_nowhere_would_be_found():
    text = "| guide | here |\n|---|---|\n| `--theirs` | `--ours 3` and `--gone` |\nWrite `--also-ours`.\n"
    assert our_flags(text) == ["--ours", "--gone", "--also-ours"]


def test_the_index_lists_every_page():
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "migration" / "README.md").read_text()))
    assert listed == {page.name for page in PAGES} - {"README.md"}
    assert listed
