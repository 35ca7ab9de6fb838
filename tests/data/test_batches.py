"""Order of training data, division over ranks, draws per visit, examples of variable length, evaluation batches."""

from itertools import islice, pairwise

import pytest
import torch
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toolkit.data.batches import BatchOrder, EvalBatches, TrainBatches, split
from toolkit.data.ragged import BucketedOrder, RaggedColumn, RaggedTable
from toolkit.data.table import TensorTable
from toolkit.data.visit_draws import BlankPixels, VisitDraws

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


def images_by_label(steps: int) -> dict[int, list[Tensor]]:
    """Return the augmented images of each label in training order."""
    table = TensorTable(input=torch.full((10, 20, 20), 200, dtype=torch.uint8), label=torch.arange(10))
    augment = BlankPixels(0.25, shape=(20, 20), grey=33, seed=0)
    images: dict[int, list[Tensor]] = {}
    for micro_batches in islice(TrainBatches(table, batch_size=4, seed=0, augment=augment).steps(0), steps):
        for batch in micro_batches:
            for label, image in zip(batch["label"].tolist(), batch["input"], strict=True):
                images.setdefault(label, []).append(image)
    return images


def test_draws_depend_only_on_the_visit_and_cover_all_values():
    draws = VisitDraws(torch.arange(101))
    visits = torch.arange(1000)
    assert torch.equal(draws(visits)[[7, 300]], draws(visits[[7, 300]]))
    assert len(draws(visits).unique()) == 101


def test_a_fraction_of_pixels_is_blanked_differently_in_each_epoch():
    by_label = images_by_label(30)
    images = torch.stack([image for visits in by_label.values() for image in visits])
    assert set(images.unique().tolist()) == {33, 200}
    assert (images == 33).float().mean().item() == pytest.approx(0.25, abs=0.01)
    for visits in by_label.values():
        assert not any(torch.equal(first, second) for first, second in pairwise(visits))


def ragged(lengths: list[int], first: float = 0.0) -> RaggedTable:
    """Build a table in which example i has the values 10 i + 1, 10 i + 2, ... in two channels."""
    values = torch.cat([10.0 * i + torch.arange(1, n + 1) + first for i, n in enumerate(lengths)] or [torch.zeros(0)])
    column = RaggedColumn.packed(torch.stack([values, -values], 1), torch.tensor(lengths))
    return RaggedTable(input=column, number=torch.arange(len(lengths)))


def test_batch_is_padded_with_zeros_and_has_lengths():
    batch = ragged([2, 1, 3])[torch.tensor([2, 1])]
    assert batch["input"][..., 0].tolist() == [[21, 22, 23], [11, 0, 0]]
    assert batch["input"][..., 1].tolist() == [[-21, -22, -23], [-11, 0, 0]]
    assert batch["input_length"].tolist() == [3, 1]
    assert batch["number"].tolist() == [2, 1]
    empty = ragged([2, 1])[torch.tensor([], dtype=torch.long)]
    shapes = {name: tuple(column.shape) for name, column in empty.items()}
    assert shapes == {"input": (0, 1, 2), "input_length": (0,), "number": (0,)}


def test_select_and_join_keep_examples():
    both = ragged([2, 1]).joined(ragged([3, 1], first=100))
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
    order = BucketedOrder.of(ragged(lengths), "input", batch_size=batch_size, seed=seed)
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
