"""Order of training data, division over ranks, and evaluation batches."""

from itertools import islice

import torch
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.batches import BatchOrder, EvalBatches, TrainBatches, split
from toolkit.data.table import TensorTable

sizes = st.integers(1, 70)
parts = st.integers(1, 5)


def table(num_samples: int) -> TensorTable:
    return TensorTable(row=torch.arange(num_samples))


def rank_steps(num_samples: int, start: int, count: int, **settings: int) -> list[list[list[int]]]:
    """Return the rows of each micro-batch of `count` steps."""
    batches = TrainBatches(table(num_samples), **{"batch_size": 8, "seed": 0} | settings)
    return [[micro["row"].tolist() for micro in step] for step in islice(batches.steps(start), count)]


@given(sizes, parts)
def test_split_is_complete_and_even(rows, count):
    pieces = [split(torch.arange(rows), count, part) for part in range(count)]
    assert torch.cat(pieces).tolist() == list(range(rows))
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) - min(lengths) <= 1


@given(sizes, sizes, st.integers(0, 3))
def test_epoch_has_every_sample_once(num_samples, batch_size, epoch):
    order = BatchOrder(num_samples=num_samples, batch_size=batch_size, seed=3)
    steps = order.steps_per_epoch
    batches = list(islice(order.batches(epoch * steps), steps))
    assert sorted(torch.cat(batches).tolist()) == list(range(num_samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(sizes, sizes, st.integers(0, 40))
def test_samples_before_counts_previous_batches(num_samples, batch_size, step):
    order = BatchOrder(num_samples=num_samples, batch_size=batch_size, seed=0)
    assert order.samples_before(step) == sum(len(batch) for batch in islice(order.batches(0), step))


def test_order_depends_only_on_seed_and_epoch():
    def order(seed: int = 0, batch_size: int = 4, epoch: int = 0) -> list[int]:
        return BatchOrder(num_samples=8, batch_size=batch_size, seed=seed).epoch(epoch).tolist()

    # A constant, because checkpoints continue with this order.
    assert order() == order(batch_size=3) == [1, 2, 4, 3, 0, 7, 5, 6]
    assert order() != order(seed=1)
    assert order() != order(epoch=1)


@given(sizes, st.integers(1, 20), st.integers(0, 25), parts)
def test_resumed_batches_equal_uninterrupted_batches(num_samples, batch_size, step, accumulation):
    setting = {"batch_size": batch_size, "accumulation": accumulation}
    uninterrupted = rank_steps(num_samples, 0, step + 5, **setting)
    assert rank_steps(num_samples, step, 5, **setting) == uninterrupted[step:]


@given(sizes, st.integers(1, 20), parts, st.sampled_from([2, 4]))
def test_micro_batches_do_not_depend_on_world_size(num_samples, batch_size, accumulation, world_size):
    setting = {"batch_size": batch_size, "accumulation": accumulation}
    single = rank_steps(num_samples, 0, 6, **setting)
    ranks = [rank_steps(num_samples, 0, 6, **setting, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(6):
        for micro in range(accumulation):
            assert [row for rank in ranks for row in rank[step][micro]] == single[step][micro]


def test_rank_without_rows_gets_an_empty_micro_batch():
    # The second step has the last of 9 samples, in the second micro-batch on rank 1.
    first, second = (rank_steps(9, 1, 1, accumulation=2, rank=rank, world_size=2)[0] for rank in (0, 1))
    assert [len(micro) for micro in first] == [0, 0]
    assert [len(micro) for micro in second] == [0, 1]


def test_workers_load_the_same_batches_and_exit():
    before = set(torch.multiprocessing.active_children())
    batches = TrainBatches(table(30), batch_size=8, seed=0, accumulation=2, num_workers=2)
    state = torch.get_rng_state()
    steps = batches.steps(3)
    fetched = [[micro["row"].tolist() for micro in step] for step in islice(steps, 9)]
    assert len(set(torch.multiprocessing.active_children()) - before) == 2
    steps.close()
    del steps
    assert set(torch.multiprocessing.active_children()) == before
    assert fetched == rank_steps(30, 3, 9, accumulation=2)
    assert torch.equal(torch.get_rng_state(), state)


@given(sizes, st.integers(1, 20), st.integers(1, 4))
def test_evaluation_batches_cover_the_table_on_any_world_size(num_samples, batch_size, world_size):
    options = {"batch_size": batch_size, "world_size": world_size}
    ranks = [EvalBatches(table(num_samples), rank=rank, **options) for rank in range(world_size)]
    joined = [row for batches in zip(*ranks, strict=True) for batch in batches for row in batch["row"].tolist()]
    assert joined == list(range(num_samples))


def test_evaluation_batches_can_be_repeated_and_use_workers():
    batches = EvalBatches(table(10), batch_size=4)
    once = [batch["row"].tolist() for batch in batches]
    assert once == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch["row"].tolist() for batch in batches] == once
    assert [batch["row"].tolist() for batch in EvalBatches(table(10), batch_size=4, num_workers=2)] == once


def test_table_batches_are_copies_of_rows_in_the_given_order():
    inputs, labels = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.uint8), torch.tensor([7, 8, 9])
    tensors = TensorTable(input=inputs, label=labels)
    batch = tensors[torch.tensor([2, 0])]
    assert batch["input"].tolist() == [[5, 6], [1, 2]]
    assert batch["label"].tolist() == [9, 7]
    batch["input"].fill_(0)
    assert tensors.columns["input"].tolist() == [[1, 2], [3, 4], [5, 6]]
    empty = tensors[torch.tensor([], dtype=torch.int64)]
    assert (empty["input"].shape, empty["input"].dtype) == ((0, 2), torch.uint8)
