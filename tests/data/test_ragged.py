"""Examples of different lengths: how a batch is filled up, and in which order they are batched."""

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.batches import EvalBatches, TrainBatches
from toolkit.data.ragged import BucketedOrder, RaggedColumn, RaggedTable


def table(lengths: list[int], first: float = 0.0) -> RaggedTable:
    """Example i holds the values 10 i + 1, 10 i + 2, ... in two bands, and its number."""
    values = torch.cat([10.0 * i + torch.arange(1, n + 1) + first for i, n in enumerate(lengths)] or [torch.zeros(0)])
    column = RaggedColumn.packed(torch.stack([values, -values], 1), torch.tensor(lengths))
    return RaggedTable(input=column, number=torch.arange(len(lengths)))


def test_a_batch_is_filled_up_with_zeros_and_knows_the_lengths():
    batch = table([2, 1, 3])[torch.tensor([2, 1])]
    assert batch["input"][..., 0].tolist() == [[21, 22, 23], [11, 0, 0]]
    assert batch["input"][..., 1].tolist() == [[-21, -22, -23], [-11, 0, 0]]
    assert batch["input_length"].tolist() == [3, 1]
    assert batch["number"].tolist() == [2, 1]


def test_a_batch_of_nothing_has_all_columns():
    batch = table([2, 1])[torch.tensor([], dtype=torch.long)]
    assert {name: tuple(column.shape) for name, column in batch.items()} == {
        "input": (0, 1, 2),
        "input_length": (0,),
        "number": (0,),
    }


def test_selected_and_joined_tables_hold_the_same_examples():
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
def test_an_epoch_in_buckets_uses_each_example_once_and_ends_with_the_short_batch(lengths, batch_size, seed, epoch):
    order = BucketedOrder.of(table(lengths), "input", batch_size=batch_size, seed=seed)
    rows = order.epoch(epoch)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    batches = rows.split(batch_size)
    assert order.steps_per_epoch == len(batches)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    steps = order.batches(epoch * len(batches))
    assert all(torch.equal(next(steps), batch) for batch in batches)


def test_batches_hold_examples_that_are_about_equally_long():
    lengths = torch.randint(1, 500, (640,), generator=torch.Generator().manual_seed(0))
    order = BucketedOrder(num_samples=640, batch_size=32, seed=0, lengths=lengths)
    filling = sum(int(lengths[b].max() * len(b) - lengths[b].sum()) for b in order.epoch(0).split(32))
    assert filling < 0.1 * lengths.sum()
    first, second = ([int(lengths[batch].max()) for batch in order.epoch(epoch).split(32)] for epoch in (0, 1))
    assert sorted(first) == sorted(second), "one pool, so each epoch has batches of the same lengths"
    assert first != sorted(first)
    assert first != second, "in an order of its own"


def test_ranks_share_each_batch_of_the_one_process_order():
    data = table([3, 1, 4, 1, 5, 2, 6])
    order = BucketedOrder.of(data, "input", batch_size=4, seed=1)

    def numbers(rank: int, world: int) -> list[list[int]]:
        batches = TrainBatches(data, batch_size=4, seed=1, order=order, rank=rank, world_size=world)
        steps = batches.steps(1)  # the short one, of three, and then the next epoch
        return [[int(i) for micro in next(steps) for i in micro["number"]] for _ in range(3)]

    alone = numbers(0, 1)
    assert [len(step) for step in alone] == [3, 4, 3]
    for world in (2, 4):
        ranks = [numbers(rank, world) for rank in range(world)]
        assert [list(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)] == alone


def test_an_evaluation_sees_each_example_on_one_rank():
    data = table([3, 1, 4, 1, 5])
    seen = [
        int(i)
        for rank in range(2)
        for b in EvalBatches(data, batch_size=4, rank=rank, world_size=2)
        for i in b["number"]
    ]
    assert sorted(seen) == list(range(5))
