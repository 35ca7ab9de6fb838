"""A sample of the faults of adapters in training that `benchmarks/faults/adapter_faults.py` measures the doctor by."""

from __future__ import annotations

import pytest

from benchmarks.faults.adapter_faults import CLEAN, OF_TRAINING, by_doctor


@pytest.mark.parametrize("fault", ["averaged over all ranks", "moments lost in a move"])
def test_a_fault_of_training_is_named(fault: str):
    assert by_doctor(fault) == OF_TRAINING[fault]


def test_adapters_that_train_and_move_as_they_should_raise_no_alarm():
    assert by_doctor(CLEAN) == ""
