"""A sample of the silent bugs of `benchmarks/faults/silent_bugs`."""

import pytest

from benchmarks.faults.silent_bugs.score import findings, report_and_finding

SAMPLE = (
    "all_ranks_see_the_same_samples",
    "balance_loss_without_effect",
    "last_micro_batch_alone",
    "router_cut_off_by_gather",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_silent_bug_is_named_and_its_corrected_twin_has_no_finding(name: str):
    _, expected = report_and_finding(name)
    assert findings(name, "buggy")[0] == expected
    assert findings(name, "corrected") == []
