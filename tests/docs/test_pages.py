"""Flags and commands of the migration guides exist, and figures agree with the benchmark results that pages cite.

Code spans that start with `--` or with a preset contain flags of a recipe that the page names as `recipes/<name>.py`,
or of a `toolkit` command. The first column of tables has flags of the other library.
"""

import contextlib
import importlib
import io
import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path

import pytest

from benchmarks import figures
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


ROWS = [
    {"arm": "moe", "accuracy %": 97.36, "each": [97.312, 97.41]},
    {"arm": "dense", "accuracy %": 97.45, "each": [97.4, 97.5]},
]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    machine = {"processor": "99.99", "date": "2026-11-22"}
    (tmp_path / "speed.json").write_text(json.dumps({"rounds": 9, "machine": machine, "rows": ROWS}))
    return tmp_path


def test_pages_agree_with_benchmark_results():
    found = {str(page.relative_to(ROOT)): figures.problems(page.read_text(encoding="utf-8")) for page in figures.PAGES}
    assert {page: wrong for page, wrong in found.items() if wrong} == {}


def page(comment: str, block: str) -> str:
    return f"# Title\n\nText.\n\n{comment}\n{block}\n\nText.\n"


TABLE = "| network | accuracy |\n|---|---|\n| MoE | 97.36 % (97.31 97.41) |\n| dense | 97.45 % |"


@pytest.mark.parametrize(
    ("comment", "block", "words"),
    [
        ("<!-- figures: speed.json -->", TABLE.replace("97.41", "97.42"), "97.42: no row"),
        ("<!-- figures: speed.json -->", TABLE.replace("97.31", "97.45"), "97.45: no row"),  # value of another row
        ("<!-- figures: speed.json[arm=dense] -->", "The MoE model reaches 97.36 %.", "97.36 is not in the record"),
        ("<!-- figures: speed.json; 0.08 = 97.45 - 97.36 -->", "Better by 0.08 points.", "is 0.09, not 0.08"),
        ("<!-- figures: speed.json; 0.09 = 97.55 - 97.46 -->", "Better by 0.09 points.", "97.55 of"),
        ("<!-- figures: speed.json -->", "It has 99.99x the rate.", "99.99 is not"),  # describes the machine
        ("", "It reaches 97.36 %.", "no record is named for 97.36"),
        ("", TABLE, "no record is named for 97.36"),
    ],
)
def test_figure_without_benchmark_result_is_reported(comment: str, block: str, words: str, records: Path):
    (problem,) = figures.problems(page(comment, block), records)
    assert words in problem
    assert problem.startswith("line 6:")
