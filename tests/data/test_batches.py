"""The order of the data is a function of (seed, epoch), its position is one integer, and no example is lost."""

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
    """Each row is its own number."""
    return TensorTable(row=torch.arange(num_samples))


def rank_steps(num_samples: int, start: int, count: int, **settings: int) -> list[list[list[int]]]:
    """The rows of `count` steps, for each step and micro-batch of one rank."""
    batches = TrainBatches(table(num_samples), **{"batch_size": 8, "seed": 0} | settings)
    return [[micro["row"].tolist() for micro in step] for step in islice(batches.steps(start), count)]


@given(sizes, parts)
def test_the_pieces_of_a_batch_are_the_batch_and_differ_by_one_row_at_most(rows, count):
    pieces = [split(torch.arange(rows), count, part) for part in range(count)]
    assert torch.cat(pieces).tolist() == list(range(rows))
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) - min(lengths) <= 1


@given(sizes, sizes, st.integers(0, 3))
def test_every_epoch_takes_every_sample_once(num_samples, batch_size, epoch):
    order = BatchOrder(num_samples=num_samples, batch_size=batch_size, seed=3)
    steps = order.steps_per_epoch
    batches = list(islice(order.batches(epoch * steps), steps))
    assert sorted(torch.cat(batches).tolist()) == list(range(num_samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert order.samples_before((epoch + 1) * steps) == (epoch + 1) * num_samples


@given(sizes, sizes, st.integers(0, 40))
def test_samples_before_a_step_are_those_the_steps_before_it_took(num_samples, batch_size, step):
    order = BatchOrder(num_samples=num_samples, batch_size=batch_size, seed=0)
    assert order.samples_before(step) == sum(len(batch) for batch in islice(order.batches(0), step))


def test_epochs_and_seeds_have_different_orders_and_each_always_the_same():
    first, second = (BatchOrder(num_samples=50, batch_size=8, seed=seed) for seed in (0, 1))
    assert first.epoch(0).tolist() == BatchOrder(num_samples=50, batch_size=4, seed=0).epoch(0).tolist()
    assert first.epoch(0).tolist() != first.epoch(1).tolist()
    assert first.epoch(0).tolist() != second.epoch(0).tolist()


@given(sizes, st.integers(1, 20), st.integers(0, 25), parts)
def test_resuming_at_any_step_gives_the_batches_of_an_unbroken_run(num_samples, batch_size, step, accumulation):
    setting = {"batch_size": batch_size, "accumulation": accumulation}
    uninterrupted = rank_steps(num_samples, 0, step + 5, **setting)
    assert rank_steps(num_samples, step, 5, **setting) == uninterrupted[step:]


@given(sizes, st.integers(1, 20), parts, st.sampled_from([2, 4]))
def test_each_micro_step_sees_the_same_rows_on_any_number_of_ranks(num_samples, batch_size, accumulation, world_size):
    setting = {"batch_size": batch_size, "accumulation": accumulation}
    alone = rank_steps(num_samples, 0, 6, **setting)
    ranks = [rank_steps(num_samples, 0, 6, **setting, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(6):
        for micro in range(accumulation):
            assert [row for rank in ranks for row in rank[step][micro]] == alone[step][micro]


def test_a_rank_without_rows_gets_an_empty_micro_batch_and_not_none():
    # 9 samples in batches of 8: the second step has one, in the last of 2 micro-batches, on the last of 2 ranks.
    first, second = (rank_steps(9, 1, 1, accumulation=2, rank=rank, world_size=2)[0] for rank in (0, 1))
    assert [len(micro) for micro in first] == [0, 0]
    assert [len(micro) for micro in second] == [0, 1]


def test_worker_processes_give_the_same_batches_and_end_with_the_iterator():
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
def test_evaluation_takes_each_sample_once_in_as_many_batches_on_every_rank(num_samples, batch_size, world_size):
    ranks = [
        [
            batch["row"].tolist()
            for batch in EvalBatches(table(num_samples), batch_size=batch_size, rank=rank, world_size=world_size)
        ]
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    # Put together across ranks, batch by batch, it is the table in its own order.
    together = [row for batches in zip(*ranks, strict=True) for rows in batches for row in rows]
    assert together == list(range(num_samples))


def test_evaluation_can_be_run_again_and_by_workers():
    batches = EvalBatches(table(10), batch_size=4)
    once = [batch["row"].tolist() for batch in batches]
    assert once == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch["row"].tolist() for batch in batches] == once
    assert [batch["row"].tolist() for batch in EvalBatches(table(10), batch_size=4, num_workers=2)] == once


def test_the_order_of_an_epoch_is_what_it_was_when_this_test_was_written():
    # Resuming on a newer version must meet the same order, so a change here is a change of format.
    assert BatchOrder(num_samples=8, batch_size=4, seed=0).epoch(0).tolist() == [1, 2, 4, 3, 0, 7, 5, 6]
