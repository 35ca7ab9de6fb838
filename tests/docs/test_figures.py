"""Figures of the documentation agree with the benchmark results that they cite."""

import json
from pathlib import Path

import pytest

from benchmarks.figures import PAGES, ROOT, problems

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
    found = {str(page.relative_to(ROOT)): problems(page.read_text(encoding="utf-8")) for page in PAGES}
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
    (problem,) = problems(page(comment, block), records)
    assert words in problem
    assert problem.startswith("line 6:")
