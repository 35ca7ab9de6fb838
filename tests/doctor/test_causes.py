"""The doctor names each fault of the toy, and a sample of `benchmarks/faults/silent_bugs`."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.faults.silent_bugs.score import findings, report_and_finding
from tests.doctor.recording import record
from toolkit.doctor.causes import diagnose
from toolkit.doctor.compare import Comparison, Evidence, apart
from toolkit.doctor.examine import judge
from toolkit.doctor.record import Record, read_records, sample_digests

TOY = Path(__file__).parent / "toy.py"

FAULTS_OF_TWO_PROCESSES = {
    "sum": "gradients W times too large",
    "refresh": "unsynchronised replica",
    "stale": "stale optimizer row after a move",
    "balance": "rank-local balance loss",
    "permutation": "wrong inverse permutation",
    "late_permutation": "wrong inverse permutation",
    "late_norm": "forward depends on the rank",
    "order": "data order changed",
    "seed": "initial weights differ",
    "rate": "learning rate depends on the world",
    "twice": "gradients too small",
    "mean": "loss normalised by rank",
    "dropped": "weights lost in a move",
}
"""Faults that change nothing in one process."""
FAULTS = FAULTS_OF_TWO_PROCESSES | {
    "recompute": "router decides otherwise under recomputation",
    "save": "expert lost on save",
    "buffer": "buffer overwritten by broadcast",
    "optimizer": "parameter outside the optimizer",
    "batch_norm": "batch statistics of one rank",
    "unsynchronised": "unsynchronised replica",
    "unfreeze": "parameter unfrozen after prepare",
    "temperature": "routing depends on the batch of the rank",
    "capacity": "routing depends on the batch of the rank",
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with records of the toy without a fault: "one" process and "two"."""
    folder = tmp_path_factory.mktemp("healthy")
    record(folder / "one", 1, TOY)
    record(folder / "two", 2, TOY)
    return folder


def read(folder: Path) -> tuple[Evidence, Evidence]:
    return Evidence(read_records(folder / "one")), Evidence(read_records(folder / "two"))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(fault: str, healthy: Path, tmp_path: Path):
    one = read(healthy)[0] if fault in FAULTS_OF_TWO_PROCESSES else record(tmp_path / "one", 1, TOY, fault)
    comparison = Comparison(one, record(tmp_path / "two", 2, TOY, fault), 1e-6)
    assert not comparison.ok
    first, *others = diagnose(comparison)
    assert first.name == FAULTS[fault], first
    assert fault == "batch_norm" or not others, "batch norm also has statistics in buffers"
    if fault.startswith("late"):
        assert first.symptom.startswith("at step 2, with equal weights and samples, ")


def test_healthy_script_has_no_finding(healthy: Path):
    comparison = Comparison(*read(healthy), 1e-6)
    assert diagnose(comparison) == []
    assert comparison.ok
    expected = "samples, expert counts, balance loss, loss, gradients, gradient norm, weights, optimizer state"
    assert {check.quantity for check in comparison.checks} >= {*expected.split(", "), "save and load"}
    assert comparison.many.has_moved(2)


def scale_gradients(records: list[Record], factor: float) -> None:
    """Scale the gradients of the first step."""
    for each in records:
        for name in [name for name in each.tensors if name.startswith("1/gradient")]:
            each.tensors[name] = each.tensors[name] * factor


def test_gradients_scaled_by_almost_1_have_no_scale_in_the_finding(healthy: Path):
    one, many = read(healthy)
    scale_gradients(many.records, 1 - 2e-5)
    (finding,) = diagnose(Comparison(one, many, 1e-6))
    assert finding.name == "wrong gradients"
    assert "1 times" not in finding.symptom


def test_script_with_random_seeds_is_not_repeatable(tmp_path: Path):
    one, many = record(tmp_path / "one", 1, TOY, "time"), record(tmp_path / "two", 2, TOY, "time")
    _, findings = judge(one, many, 1e-6, lambda name, world, _: record(tmp_path / name, world, TOY, "time"))
    assert findings[0].name == "not repeatable"


def test_differences_beyond_rounding_are_a_finding(healthy: Path):
    (one, many), (rounded, _) = read(healthy), read(healthy)
    scale_gradients(many.records, 1 + 1e-5)
    scale_gradients([rounded.first], 1 + 2e-6)
    yardstick = Comparison(one, rounded, 1e-6)
    assert not Comparison(one, many, 1e-6).ok
    assert Comparison(one, many, 1e-6, yardstick).ok
    scale_gradients([many.first], 1 + 2e-5)
    assert not Comparison(one, many, 1e-6, yardstick)["gradients"].ok


def test_nan_in_one_run_is_an_infinite_difference():
    assert apart(torch.tensor([1.0, torch.nan]), torch.ones(2)) == math.inf


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


def pad(rows: list[Tensor], value: float) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def digests(inputs: list, **labels: Tensor) -> list:
    return sample_digests(nn.Identity(), inputs, labels)


def test_sample_digests_ignore_padding_with_zeros():
    short, long = torch.randn(3, 2), torch.randn(5, 2)
    first, second = digests([pad([short, long], 0)])
    assert [first] == digests([short[None]])
    assert first != second


def test_sample_digests_ignore_labels_that_the_loss_ignores():
    labels = [torch.tensor([4, 0, 0]), torch.tensor([4, 0, 0, 0, 7])]
    padded = digests([], labels=pad(labels, -100))
    assert padded == [digest for row in labels for digest in digests([], labels=row[None])]
    assert len(set(padded)) == 2


def test_sample_digests_with_a_mask_ignore_padding_of_any_value():
    ids, mask = torch.tensor([[9, 9, 4, 5], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    masked = digests([{"input_ids": ids, "attention_mask": mask}])
    assert masked[:1] == digests([{"input_ids": ids[:1, 2:], "attention_mask": mask[:1, 2:]}])
