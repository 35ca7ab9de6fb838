"""The replay buffer of a data set."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from toolkit.data.replay_memory import ReplayMemory
from toolkit.data.table import TensorTable

LABELS = torch.randint(4, (400,), generator=torch.Generator().manual_seed(0))


def buffer_of(labels: Tensor = LABELS, capacity: int = 20, seed: int = 0, added: int = 0) -> ReplayMemory:
    """Build a replay buffer with the first `added` rows."""
    memory = ReplayMemory(TensorTable(input=torch.zeros(len(labels), 1), label=labels), capacity, seed=seed)
    memory.add(torch.arange(added))
    return memory


@pytest.mark.parametrize(
    ("labels", "capacity", "counts"),
    [
        (LABELS, 20, {0: 5, 1: 5, 2: 5, 3: 5}),
        (torch.tensor([0] * 2 + [1] * 50 + [2] * 50), 21, {0: 2, 1: 10, 2: 9}),
    ],
    ids=["equal", "rare class"],
)
def test_buffer_is_bounded_and_balanced_over_classes(labels, capacity, counts):
    memory = buffer_of(labels, capacity, added=len(labels))
    assert len(memory) == capacity
    assert Counter(labels[memory.rows].tolist()) == counts


@given(seed=st.integers(0, 2**31), capacity=st.integers(1, 60), pieces=st.integers(1, 12))
@settings(max_examples=40)
def test_buffer_depends_only_on_the_set_of_added_rows(seed, capacity, pieces):
    draws = torch.Generator().manual_seed(seed)
    seen = torch.randint(400, (150,), generator=draws)
    joint, in_pieces = (buffer_of(capacity=capacity, seed=seed) for _ in range(2))
    joint.add(seen)
    for piece in seen[torch.randperm(150, generator=draws)].chunk(pieces):
        in_pieces.add(piece)
        in_pieces.add(piece)
    assert torch.equal(joint.rows, in_pieces.rows)
    assert len(joint) == min(capacity, len(seen.unique()))
    assert set(joint.rows.tolist()) <= set(seen.tolist())


def test_draw_depends_only_on_seed_and_address():
    memory = buffer_of(added=400)
    first, again, later = memory.draw(8, "sleep", 3), memory.draw(8, "sleep", 3), memory.draw(8, "sleep", 4)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert len(first.unique()) == 8
    assert len(memory.draw(50, 0)) == 50, "more than the 20 rows"
    assert memory.draw(50, 0).unique().equal(memory.rows)


def test_drawn_visits_have_drawn_rows_and_differ_between_addresses():
    memory = buffer_of(added=400)
    visits = [memory.draw_visits(8, "sleep", 3, turn) for turn in range(50)]
    for turn, each in enumerate(visits):
        assert torch.equal(each % 400, memory.draw(8, "sleep", 3, turn))
        assert torch.equal(each, memory.draw_visits(8, "sleep", 3, turn))
    assert len(torch.cat(visits).unique()) == 400


def test_rows_are_kept_with_equal_probability():
    kept = torch.zeros(40)
    for seed in range(400):
        kept[buffer_of(torch.zeros(40, dtype=torch.int64), 10, seed, added=40).rows] += 1
    # Counts are binomial(400, 1/4), with mean 100 and standard deviation 8.7; 43 is five standard deviations.
    assert kept.sum() == 4000
    assert (kept - 100).abs().max() < 43
