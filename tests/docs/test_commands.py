"""Fenced blocks marked `run` in the documentation run without errors, in page order, and print what pages show."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.processes import ROOT
from tests.docs.printed import PAGES, Block, blocks_of, checkout, first_missing, run_block

BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, (_, block) in enumerate(blocks_of(page.read_text()), start=1)
]


@pytest.fixture(scope="module")
def places() -> Iterator[tuple[Path, Path]]:
    with checkout() as found:
        yield found


@pytest.mark.parametrize("block", BLOCKS)
def test_block_marked_run_prints_the_output_of_the_page(block: Block, places: tuple[Path, Path]):
    printed = run_block(block, *places)
    assert (block.output is None) == (printed == ""), printed
    assert first_missing(block.output or "", printed) is None, printed


@pytest.mark.parametrize(
    ("shown", "printed", "is_equal"),
    [
        ("loss 1.934, 3.1 s", "loss 1.936, 47 s", True),
        ("loss 1.934", "loss 2.934", False),
        ("8 experts", "8 ranks", False),
        ("a\n...\nc", "a\nb\nc", True),
        ("a\nc", "a\nb\nc", False),
    ],
)
def test_output_of_a_page_is_compared_without_times(shown, printed, is_equal):
    assert (first_missing(shown, printed) is None) == is_equal
