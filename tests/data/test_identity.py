"""The identity of a data set: other for other data, the same for what processors only round differently."""

import itertools
import json

import pytest
import torch

import toolkit.data.identity
from toolkit.data.identity import identity_of, same_data
from toolkit.data.ragged import RaggedColumn, RaggedTable
from toolkit.data.table import TensorTable

ROWS = 1000


def make(seed: int = 0, rows: int = ROWS, **changes: torch.Tensor) -> TensorTable:
    draws = torch.Generator().manual_seed(seed)
    columns = {
        "input": torch.randn(rows, 3, 4, generator=draws),
        "weight": torch.rand(rows, generator=draws),
        "nothing": torch.zeros(rows, 3, 0),
        "label": torch.randint(10, (rows,), generator=draws),
        "tokens": torch.randint(256, (rows, 5), generator=draws, dtype=torch.uint8),
        "pixels": torch.randint(256, (rows, 4, 4), generator=draws, dtype=torch.uint8),
    }
    return TensorTable(**(columns | changes))


def flipped(column: torch.Tensor) -> torch.Tensor:
    other = column.clone()
    other.view(-1)[-1] += 1
    return other


BASE = make().columns
OTHERS = {
    "other draws": make(seed=1),
    "fewer rows": make(rows=ROWS - 1),
    "one other label": make(label=flipped(BASE["label"])),
    "one other token": make(tokens=flipped(BASE["tokens"])),
    "labels of another type": make(label=BASE["label"].int()),
    "inputs of another shape": make(input=BASE["input"].flatten(1)),
    "other inputs": make(input=make(seed=1).columns["input"]),
    "inputs in another unit": make(input=BASE["input"] * 1.01),
    "inputs in another order": make(input=BASE["input"].flip(0) + torch.linspace(0, 1, ROWS)[:, None, None]),
    "other pixels": make(pixels=make(seed=1).columns["pixels"]),
    "one other pixel": make(pixels=flipped(BASE["pixels"])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_data_have_another_identity(name):
    assert not same_data(identity_of(make()), identity_of(OTHERS[name]))


def test_the_identity_is_the_same_each_time_and_after_it_was_written():
    found = identity_of(make())
    assert identity_of(make()) == found
    assert same_data(json.loads(json.dumps(found)), found)
    assert found["rows"] == ROWS


def test_what_another_processor_rounds_otherwise_is_the_same_data():
    rounded = BASE["input"] * (1 + torch.randint(-1, 2, BASE["input"].shape) * torch.finfo(torch.float32).eps)
    one_level = BASE["pixels"].clone()
    one_level[:, 0, 0] ^= (torch.arange(ROWS) % 50 == 0).to(torch.uint8)
    other = make(input=rounded, pixels=one_level)
    assert not torch.equal(other.columns["input"], BASE["input"])
    assert same_data(identity_of(make()), identity_of(other) | {"decoder": "another"})


def test_inputs_that_are_not_finite_have_an_identity_too():
    inputs = BASE["input"].clone()
    inputs[3, 0, 0], inputs[4, 0, 0] = torch.nan, torch.inf
    assert same_data(identity_of(make(input=inputs)), identity_of(make(input=inputs)))


def test_of_large_data_a_part_is_read_that_lies_evenly(monkeypatch):
    monkeypatch.setattr(toolkit.data.identity, "MOST_BYTES", 1)
    table, read = make(), []
    get = type(table).__getitem__
    monkeypatch.setattr(TensorTable, "__getitem__", lambda self, rows: read.extend(rows.tolist()) or get(self, rows))
    found = identity_of(table)
    assert len(read) == ROWS / 4
    assert read == sorted(read)
    assert {b - a for a, b in itertools.pairwise(read)} == {4}
    assert not same_data(found, identity_of(make(seed=1)))
    assert not same_data(found, identity_of(make(rows=ROWS - 1)))


def test_ragged_data_have_one_and_a_selection_has_another():
    lengths = torch.arange(1, 9)
    table = RaggedTable(input=RaggedColumn.packed(torch.arange(36.0), lengths), label=torch.arange(8))
    assert same_data(identity_of(table), identity_of(table.select(torch.arange(8))))
    assert not same_data(identity_of(table), identity_of(table.select(torch.arange(7))))
