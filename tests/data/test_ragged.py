"""Variable-length examples: padding and bucketed batches."""

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.batches import TrainBatches
from toolkit.data.ragged import BucketedOrder, RaggedColumn, RaggedTable


def table(lengths: list[int], first: float = 0.0) -> RaggedTable:
    """Build a table in which example i has the values 10 i + 1, 10 i + 2, ... in two channels."""
    values = torch.cat([10.0 * i + torch.arange(1, n + 1) + first for i, n in enumerate(lengths)] or [torch.zeros(0)])
    column = RaggedColumn.packed(torch.stack([values, -values], 1), torch.tensor(lengths))
    return RaggedTable(input=column, number=torch.arange(len(lengths)))


def test_batch_is_padded_with_zeros_and_has_lengths():
    batch = table([2, 1, 3])[torch.tensor([2, 1])]
    assert batch["input"][..., 0].tolist() == [[21, 22, 23], [11, 0, 0]]
    assert batch["input"][..., 1].tolist() == [[-21, -22, -23], [-11, 0, 0]]
    assert batch["input_length"].tolist() == [3, 1]
    assert batch["number"].tolist() == [2, 1]
    empty = table([2, 1])[torch.tensor([], dtype=torch.long)]
    shapes = {name: tuple(column.shape) for name, column in empty.items()}
    assert shapes == {"input": (0, 1, 2), "input_length": (0,), "number": (0,)}


def test_select_and_join_keep_examples():
    both = table([2, 1]).joined(table([3, 1], first=100))
    batch = both.select(torch.tensor([3, 0]))[torch.tensor([0, 1])]
    assert batch["input"][..., 0].tolist() == [[111, 0], [1, 2]]
    assert batch["number"].tolist() == [1, 0]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 3),
)
def test_bucketed_epoch_has_each_example_once_and_a_short_last_batch(lengths, batch_size, seed, epoch):
    order = BucketedOrder.of(table(lengths), "input", batch_size=batch_size, seed=seed)
    rows = order.epoch(epoch)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    batches = rows.split(batch_size)
    assert order.steps_per_epoch == len(batches)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    steps = order.batches(epoch * len(batches))
    assert all(torch.equal(next(steps), batch) for batch in batches)


def test_bucketed_batches_have_little_padding():
    lengths = torch.randint(1, 500, (640,), generator=torch.Generator().manual_seed(0))
    order = BucketedOrder(num_samples=640, batch_size=32, seed=0, lengths=lengths)
    padding = sum(int(lengths[b].max() * len(b) - lengths[b].sum()) for b in order.epoch(0).split(32))
    assert padding < 0.1 * lengths.sum()
    first, second = ([int(lengths[batch].max()) for batch in order.epoch(epoch).split(32)] for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != sorted(first)
    assert first != second


def test_bucketed_batches_do_not_depend_on_world_size():
    data = table([3, 1, 4, 1, 5, 2, 6])
    order = BucketedOrder.of(data, "input", batch_size=4, seed=1)

    def numbers(rank: int, world: int) -> list[list[int]]:
        batches = TrainBatches(data, batch_size=4, seed=1, order=order, rank=rank, world_size=world)
        steps = batches.steps(1)  # the short batch with three examples, then the next epoch
        return [[int(i) for micro in next(steps) for i in micro["number"]] for _ in range(3)]

    single = numbers(0, 1)
    assert [len(step) for step in single] == [3, 4, 3]
    for world in (2, 4):
        ranks = [numbers(rank, world) for rank in range(world)]
        assert [list(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)] == single
