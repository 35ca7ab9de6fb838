"""Tables: columns of one length, fetched by whole batches."""

import torch

from toolkit.data.table import TensorTable


def test_a_batch_holds_the_rows_that_were_asked_for_in_that_order():
    table = TensorTable(input=torch.tensor([[1, 2], [3, 4], [5, 6]]), label=torch.tensor([7, 8, 9]))
    batch = table[torch.tensor([2, 0])]
    assert batch["input"].tolist() == [[5, 6], [1, 2]]
    assert batch["label"].tolist() == [9, 7]


def test_no_rows_make_an_empty_batch_that_keeps_shapes_and_types():
    table = TensorTable(input=torch.zeros(3, 28, 28, dtype=torch.uint8))
    batch = table[torch.tensor([], dtype=torch.int64)]
    assert batch["input"].shape == (0, 28, 28)
    assert batch["input"].dtype == torch.uint8


def test_a_batch_is_a_copy_of_its_rows():
    table = TensorTable(input=torch.zeros(3))
    table[torch.tensor([0])]["input"].fill_(1)
    assert table.columns["input"].tolist() == [0, 0, 0]
