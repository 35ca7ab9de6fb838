"""A sample of the faults of adapters in training that `benchmarks/faults/adapter_faults.py` measures the doctor by."""

from __future__ import annotations

import pytest

from benchmarks.faults.adapter_faults import CLEAN, OF_FILES, OF_TRAINING, by_doctor
from tests.experts.hosts.peft.faults import SETTINGS, WEIGHTS


@pytest.mark.parametrize("fault", ["averaged over all ranks", "frozen while claimed trained", "moments lost in a move"])
def test_a_fault_of_training_is_named(fault: str):
    assert by_doctor(fault) == OF_TRAINING[fault]


def test_adapters_that_train_and_move_as_they_should_raise_no_alarm():
    assert by_doctor(CLEAN) == ""


def test_ten_faults_and_more_are_counted():
    assert set(OF_FILES) <= WEIGHTS.keys() | SETTINGS.keys()
    assert len({*OF_FILES, *OF_TRAINING}) >= 10
