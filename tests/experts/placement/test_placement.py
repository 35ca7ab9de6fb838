"""Placements map experts to slots; moves are the rows to copy between two placements."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.placement.placements import placements
from toolkit.errors import UserError
from toolkit.experts.placement.placement import (
    EMPTY_ROW,
    ExpertPlacement,
    Move,
    Place,
    contiguous,
    moves,
    owner_moves,
    with_spare_slots,
)


def test_uneven_placement_with_replicas_by_hand():
    placement = ExpertPlacement(((1, EMPTY_ROW, 0), (2, 1), ()))
    assert (placement.ranks, placement.num_experts, placement.stride) == (3, 3, 3)
    assert placement.replicas(1) == (Place(0, 0), Place(1, 1))
    assert placement.owner(1) == Place(0, 0)
    assert placement.replica_on(1, 1) == Place(1, 1)
    assert placement.replica_on(0, 1) is None
    assert placement.has_replicas


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((), "at least one rank"),
        (((EMPTY_ROW,), ()), "at least one expert"),
        (((0, 1), (3,)), "expert 2 has no slot"),
        (((0, 1, 0),), "rank 0 holds expert 0 twice"),
        (((0, -2),), "expert id -2 is negative"),
    ],
)
def test_invalid_slots_raise(slots: tuple[tuple[int, ...], ...], message: str):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(slots)


def test_contiguous_with_a_remainder_leaves_spare_slots():
    assert contiguous(6, 3).slots == ((0, 1), (2, 3), (4, 5))
    assert contiguous(7, 3).slots == ((0, 1, 2), (3, 4, EMPTY_ROW), (5, 6, EMPTY_ROW))
    assert contiguous(3, 2, slots_per_rank=3).slots == ((0, 1, EMPTY_ROW), (2, EMPTY_ROW, EMPTY_ROW))


def test_contiguous_with_too_many_experts_raises():
    with pytest.raises(UserError, match="num_experts=1,000,000,000: more than 1,048,576 are not supported"):
        contiguous(10**9, 2)


@given(placements())
def test_json_round_trip_and_dispatcher_tables(placement: ExpertPlacement):
    data = json.loads(json.dumps(placement.to_dict()))
    assert ExpertPlacement.from_dict(data) == placement
    with pytest.raises(ValueError, match="slots hold"):
        ExpertPlacement.from_dict({**data, "num_experts": placement.num_experts + 1})
    expert_of_slot = placement.expert_of_slot().flatten()
    for expert, row in enumerate(placement.slots_of_experts().tolist()):
        slots = [slot for slot in row if slot != EMPTY_ROW]
        assert row == slots + [EMPTY_ROW] * (len(row) - len(slots))
        assert [Place(*divmod(slot, placement.stride)) for slot in slots] == list(placement.replicas(expert))
        assert {int(expert_of_slot[slot]) for slot in slots} == {expert}
        assert len(slots) == placement.num_replicas()[expert]


def test_moves_of_owners_new_experts_and_spare_slots_by_hand():
    old, new = ExpertPlacement(((0, 1), (2, 1))), ExpertPlacement(((0, EMPTY_ROW), (2, 1)))
    assert moves(old, new) == []
    assert owner_moves(old, new) == [Move(1, 0, 1, 1, 1)], "optimizer rows move without weights"
    assert moves(ExpertPlacement(((0, EMPTY_ROW),)), ExpertPlacement(((0, 1),))) == []
    spare = with_spare_slots(contiguous(4, 2), 1)
    assert spare.slots == ((0, 1, EMPTY_ROW), (2, 3, EMPTY_ROW))
    assert moves(contiguous(4, 2), spare) == []
    with pytest.raises(ValueError, match=r"shorter|longer"):
        moves(contiguous(2, 1), contiguous(2, 2))


@given(st.data())
def test_moves_turn_the_old_placement_into_the_new(data: st.DataObject):
    old = data.draw(placements())
    new = data.draw(placements(ranks=old.ranks))
    rows = {(r, s): e for r, row in enumerate(old.slots) for s, e in enumerate(row)}
    after = dict(rows)
    for move in moves(old, new):
        assert rows[move.source_rank, move.source_slot] == move.expert
        assert (move.source_rank, move.source_slot) != (move.rank, move.slot)
        assert move.travels == (move.expert not in old.slots[move.rank])
        after[move.rank, move.slot] = move.expert
    for rank, row in enumerate(new.slots):
        for slot, expert in enumerate(row):
            assert expert == EMPTY_ROW or expert >= old.num_experts or after[rank, slot] == expert
    assert moves(old, old) == owner_moves(old, old) == []
