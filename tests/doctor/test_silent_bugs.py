"""A sample of the public silent bugs that `benchmarks/faults/silent_bugs` measures the doctor by."""

from __future__ import annotations

import pytest

from benchmarks.faults.silent_bugs.score import about, findings

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
