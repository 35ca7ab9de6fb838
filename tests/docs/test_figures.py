"""Each measured number of README.md, recipes/README.md and docs/ is in the record that its page names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.figures import PAGES, ROOT, blocks, problems

ROW = {
    "arm": "mixture",
    "threads": 1,
    "accuracy %": 97.36,
    "each": [97.312, 97.41],
    "note": "1.408 to 1.502",
    "rate": 15841,
}
OTHER = {"arm": "dense", "threads": 2, "accuracy %": 97.45, "each": [97.4, 97.5], "note": "", "rate": 25405}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    machine = {"processor": "99.99", "date": "2026-11-22"}
    (tmp_path / "speed.json").write_text(json.dumps({"rounds": 9, "machine": machine, "rows": [ROW, OTHER]}))
    return tmp_path


def test_every_page_agrees_with_the_records():
    found = {str(page.relative_to(ROOT)): problems(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: wrong for page, wrong in found.items() if wrong} == {}


def numbers_of(page: Path) -> Iterator[tuple[str, str, int]]:
    """Each number of two decimals or more below a comment that names a record: the comment, the block (of a table one
    line, below its head), and where in it the number ends."""
    for _, block, comment in blocks(page.read_text(encoding="utf-8")):
        lines = block.split("\n")
        table = lines[0].startswith("|")
        head = "\n".join(lines[:2]) + "\n" if table else ""
        for part in lines[2:] if table else [block]:
            for number in re.finditer(r"(?<![\w.`])\d+\.\d{2,}(?![\w.`])", part):
                if comment is not None and ".json" in comment:
                    yield comment, head + part, len(head) + number.end()


def test_a_page_that_differs_from_a_record_in_a_digit_fails(tmp_path: Path):
    copy = tmp_path / "README.md"
    text = PAGES[0].read_text(encoding="utf-8")
    _, block, end = next(numbers_of(PAGES[0]))
    line = block[block.rindex("\n") + 1 :]
    end -= len(block) - len(line)
    changed = f"{line[: end - 1]}{(int(line[end - 1]) + 1) % 10}{line[end:]}"
    copy.write_text(text.replace(line, changed), encoding="utf-8")
    (problem,) = problems(copy.read_text(encoding="utf-8"))
    number = re.search(r"[\d.]+$", changed[:end])
    assert number is not None
    assert number.group() in problem


def page(comment: str, block: str) -> str:
    return f"# A page\n\nWords.\n\n{comment}\n{block}\n\nMore words.\n"


TABLE = "| network | accuracy |\n|---|---|\n| mixture | 97.36 % (97.31 97.41) |\n| dense | 97.45 % |"


@pytest.mark.parametrize(
    ("comment", "block", "words"),
    [
        ("<!-- figures: speed.json -->", TABLE.replace("97.41", "97.42"), "97.42: no row"),
        ("<!-- figures: speed.json -->", TABLE.replace("97.31", "97.45"), "97.45: no row"),  # of the other row
        ("<!-- figures: speed.json[arm=dense] -->", "The mixture reaches 97.36 %.", "97.36 is not in the record"),
        ("<!-- figures: speed.json; 0.08 = 97.45 - 97.36 -->", "Better by 0.08 points.", "is 0.09, not 0.08"),
        ("<!-- figures: speed.json; 0.09 = 97.55 - 97.46 -->", "Better by 0.09 points.", "97.55 of"),
        ("<!-- figures: speed.json -->", "It has 99.99x the rate.", "99.99 is not"),  # the machine is no figure
        ("", "It reaches 97.36 %.", "no record is named for 97.36"),
        ("", TABLE, "no record is named for 97.36"),
    ],
)
def test_numbers_that_are_not(comment: str, block: str, words: str, records: Path):
    (problem,) = problems(page(comment, block), records)
    assert words in problem
    assert problem.startswith("line 6:")
