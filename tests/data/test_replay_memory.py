from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.replay_memory import ReplayMemory
from toolkit.data.table import TensorTable


def table(rows: int = 400, classes: int = 4) -> TensorTable:
    draws = torch.Generator().manual_seed(0)
    return TensorTable(
        input=torch.arange(rows).float()[:, None],
        label=torch.randint(classes, (rows,), generator=draws),
    )


def counts(memory: ReplayMemory) -> dict[int, int]:
    """Remembered rows of each class."""
    return Counter(memory.table[memory.rows]["label"].tolist())


def test_a_memory_is_bounded_and_holds_as_many_of_each_class():
    memory = ReplayMemory(table(), 20, seed=0)
    memory.add(torch.arange(400))
    assert len(memory) == 20
    assert counts(memory) == {0: 5, 1: 5, 2: 5, 3: 5}


def test_classes_that_are_rare_leave_their_room_to_the_others():
    labels = torch.tensor([0] * 2 + [1] * 50 + [2] * 50)
    memory = ReplayMemory(TensorTable(input=torch.zeros(102, 1), label=labels), 21, seed=0)
    memory.add(torch.arange(102))
    assert counts(memory) == {0: 2, 1: 10, 2: 9}


@given(seed=st.integers(0, 2**31), capacity=st.integers(1, 60), pieces=st.integers(1, 12))
@settings(max_examples=40)
def test_what_is_remembered_depends_on_what_was_seen_and_not_on_when_or_how_often(seed, capacity, pieces):
    draws = torch.Generator().manual_seed(seed)
    seen = torch.randint(400, (150,), generator=draws)
    at_once, bit_by_bit = (ReplayMemory(table(), capacity, seed=seed) for _ in range(2))
    at_once.add(seen)
    for piece in seen[torch.randperm(150, generator=draws)].chunk(pieces):
        bit_by_bit.add(piece)
        bit_by_bit.add(piece)
    assert torch.equal(at_once.rows, bit_by_bit.rows)
    assert len(at_once) == min(capacity, len(seen.unique()))
    assert set(at_once.rows.tolist()) <= set(seen.tolist())


def test_a_draw_is_a_function_of_seed_and_address():
    memory = ReplayMemory(table(), 20, seed=0)
    memory.add(torch.arange(400))
    first, again, later = memory.draw(8, "sleep", 3), memory.draw(8, "sleep", 3), memory.draw(8, "sleep", 4)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert len(first.unique()) == 8
    assert len(memory.draw(50, 0)) == 50, "more than there are: each at least twice"
    assert memory.draw(50, 0).unique().equal(memory.rows)


def test_a_draw_of_visits_is_the_draw_of_rows_and_another_visit_at_each_address():
    memory = ReplayMemory(table(), 20, seed=0)
    memory.add(torch.arange(400))
    visits = [memory.draw_visits(8, "sleep", 3, turn) for turn in range(50)]
    for turn, each in enumerate(visits):
        assert torch.equal(each % 400, memory.draw(8, "sleep", 3, turn))
        assert torch.equal(each, memory.draw_visits(8, "sleep", 3, turn))
    assert len(torch.cat(visits).unique()) == 400


def test_a_memory_comes_back_from_its_state():
    memory, other = (ReplayMemory(table(), 20, seed=0) for _ in range(2))
    memory.add(torch.arange(300))
    other.load_state_dict(memory.state_dict())
    for each in (memory, other):
        each.add(torch.arange(300, 400))
    assert torch.equal(memory.rows, other.rows)


def test_every_row_is_as_likely_to_be_remembered():
    labels = TensorTable(input=torch.zeros(40, 1), label=torch.zeros(40, dtype=torch.int64))
    kept = torch.zeros(40)
    for seed in range(400):
        memory = ReplayMemory(labels, 10, seed=seed)
        memory.add(torch.arange(40))
        kept[memory.rows] += 1
    # Each count is binomial(400, 1/4): mean 100, standard deviation 8.7; five of these are 43.
    assert kept.sum() == 4000
    assert (kept - 100).abs().max() < 43
