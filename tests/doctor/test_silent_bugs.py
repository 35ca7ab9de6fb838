"""A sample of the public silent bugs that `benchmarks/faults/silent_bugs` measures the doctor by."""

from __future__ import annotations

import pytest

from benchmarks.faults.silent_bugs.score import BUGS, about, bugs, findings

SAMPLE = (
    "all_ranks_see_the_same_samples",
    "balance_loss_without_effect",
    "last_micro_batch_alone",
    "router_cut_off_by_gather",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_silent_bug_is_named_and_its_corrected_twin_is_not(name: str):
    _, expected = about(name)
    assert findings(name, "buggy")[0] == expected
    assert findings(name, "corrected") == []


def test_every_bug_is_short_and_says_where_it_was_reported():
    assert len(bugs()) == 25
    assert len({about(name)[0] for name in bugs()}) == 25
    assert [name for name in bugs() if len((BUGS / f"{name}.py").read_text().splitlines()) > 40] == []
