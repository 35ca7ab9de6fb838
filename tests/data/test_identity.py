"""The identity of a data set, which tolerates rounding differences between processors."""

import itertools
import json

import pytest
import torch
from torch import Tensor

import toolkit.data.identity
from toolkit.data.identity import identity_of, same_data
from toolkit.data.ragged import RaggedColumn, RaggedTable
from toolkit.data.table import TensorTable

ROWS = 1000


def make(seed: int = 0, rows: int = ROWS, **changes: Tensor) -> TensorTable:
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


def with_one_change(column: Tensor) -> Tensor:
    changed = column.clone()
    changed.view(-1)[-1] += 1
    return changed


BASE = make().columns
OTHERS = {
    "seed": make(seed=1),
    "rows": make(rows=ROWS - 1),
    "label": make(label=with_one_change(BASE["label"])),
    "token": make(tokens=with_one_change(BASE["tokens"])),
    "label type": make(label=BASE["label"].int()),
    "input shape": make(input=BASE["input"].flatten(1)),
    "inputs": make(input=make(seed=1).columns["input"]),
    "input scale": make(input=BASE["input"] * 1.01),
    "input order": make(input=BASE["input"].flip(0) + torch.linspace(0, 1, ROWS)[:, None, None]),
    "pixels": make(pixels=make(seed=1).columns["pixels"]),
    "pixel": make(pixels=with_one_change(BASE["pixels"])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_different_data_have_different_identities(name):
    assert not same_data(identity_of(make()), identity_of(OTHERS[name]))


def test_identity_is_reproducible_and_serializable():
    identity = identity_of(make())
    assert identity_of(make()) == identity
    assert same_data(json.loads(json.dumps(identity)), identity)
    assert identity["rows"] == ROWS


def test_identity_tolerates_rounding_differences():
    rounded = BASE["input"] * (1 + torch.randint(-1, 2, BASE["input"].shape) * torch.finfo(torch.float32).eps)
    one_level = BASE["pixels"].clone()
    one_level[:, 0, 0] ^= (torch.arange(ROWS) % 50 == 0).to(torch.uint8)
    other = make(input=rounded, pixels=one_level)
    assert not torch.equal(other.columns["input"], BASE["input"])
    assert same_data(identity_of(make()), identity_of(other) | {"decoder": "another"})


def test_inputs_with_nan_and_inf_have_an_identity():
    inputs = BASE["input"].clone()
    inputs[3, 0, 0], inputs[4, 0, 0] = torch.nan, torch.inf
    assert same_data(identity_of(make(input=inputs)), identity_of(make(input=inputs)))


def test_large_data_are_sampled_evenly(monkeypatch):
    monkeypatch.setattr(toolkit.data.identity, "MOST_BYTES", 1)
    table, read = make(), []
    get = type(table).__getitem__
    monkeypatch.setattr(TensorTable, "__getitem__", lambda self, rows: read.extend(rows.tolist()) or get(self, rows))
    identity = identity_of(table)
    assert len(read) == ROWS / 4
    assert {b - a for a, b in itertools.pairwise(read)} == {4}
    assert not same_data(identity, identity_of(make(seed=1)))
    assert not same_data(identity, identity_of(make(rows=ROWS - 1)))


def test_identity_of_ragged_data_depends_on_its_rows():
    lengths = torch.arange(1, 9)
    table = RaggedTable(input=RaggedColumn.packed(torch.arange(36.0), lengths), label=torch.arange(8))
    assert same_data(identity_of(table), identity_of(table.select(torch.arange(8))))
    assert not same_data(identity_of(table), identity_of(table.select(torch.arange(7))))
