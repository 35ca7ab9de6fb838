"""Copies of token rows: one for each peer that a row visits, or for each slot, and the order in which they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Copies:
    """N copies of T rows, any number of each. Tensors are int64."""

    token_N: Int[Tensor, " N"]
    """The row of which each copy is one."""
    place_N: Int[Tensor, " N"]
    """The places of the copies of row 0, then of row 1, and so on."""
    first_T: Int[Tensor, " T"]
    """Where the places of each row begin in `place_N`."""


@dataclass(frozen=True, slots=True)
class SlotOrder(Copies):
    """The copies are sorted by slot, one for each assignment of a row (token * K + choice) that is not left out."""

    rows_per_slot: Int[Tensor, " S"]
    """(S): the number of assignments of each slot."""
    assignment_N: Int[Tensor, " N"]
    """The assignment of each copy; the sort is stable."""
    kept_N: Int[Tensor, " N"] | None
    """The assignments that are not left out, in ascending order; None: all."""


def visited(peer_TK: Int[Tensor, "T K"], peers: int) -> Bool[Tensor, "T P"]:
    """(T, P): whether a row has a choice at each of `peers`; the number `peers` stands for none of them."""
    visits_TP = torch.zeros(len(peer_TK), peers + 1, dtype=torch.bool, device=peer_TK.device)
    return visits_TP.scatter_(1, peer_TK, True)[:, :peers]


def visits(visits_TP: Bool[Tensor, "T P"], total: int) -> Copies:
    """The copies of rows for the peers that they visit, `total` in all: by peer, and then by row. No host sync."""
    visits_PT = visits_TP.t().contiguous()
    copies = places_of_true(visits_PT, total)
    place_PT = visits_PT.flatten().cumsum(0).view(visits_PT.shape) - 1
    place_N = place_PT.t().flatten().index_select(0, places_of_true(visits_TP, total))
    return Copies(copies % max(1, len(visits_TP)), place_N, _firsts(visits_TP))


def sort_by_slot(slots_TK: Int[Tensor, "T K"], num_slots: int, total: int) -> SlotOrder:
    """Count the assignments of each slot and sort them stably by slot. No host sync.

    Those of slots outside of 0 to `num_slots` - 1 are left out; `total` are not.
    """
    top_k = slots_TK.shape[1]
    slot_N, kept_N = slots_TK.flatten(), None
    if total == slots_TK.numel():
        first_T = torch.arange(0, total, top_k, device=slot_N.device)
    else:
        here_TK = (slots_TK >= 0) & (slots_TK < num_slots)
        kept_N, first_T = places_of_true(here_TK, total), _firsts(here_TK)
        slot_N = slot_N.index_select(0, kept_N)
    order_N, place_N = _sorted(slot_N)
    assignment_N = order_N if kept_N is None else kept_N.index_select(0, order_N)
    token_N = assignment_N // top_k if top_k > 1 else assignment_N
    return SlotOrder(token_N, place_N, first_T, count(slot_N, num_slots), assignment_N, kept_N)


def count(slot_N: Int[Tensor, " N"], num_slots: int) -> Int[Tensor, " S"]:
    """(S): how often each slot is in `slot_N`."""
    # Not bincount: on a GPU it asks for the largest value first, which is a host sync.
    return slot_N.new_zeros(num_slots).scatter_add_(0, slot_N, torch.ones_like(slot_N))


def places_of_true(mask: Bool[Tensor, "*T"], total: int) -> Int[Tensor, " N"]:
    """The places of the `total` elements of `mask` that are True, counted through all its dimensions. No host sync."""
    return torch.nonzero_static(mask.flatten(), size=total).squeeze(1)


def place_within_slot(
    slots_TK: Int[Tensor, "T K"], num_slots: int, kept_TK: Bool[Tensor, "T K"] | None = None
) -> tuple[Int[Tensor, "T K"], Int[Tensor, " S"]]:
    """(T, K): how many earlier assignments the same slot has; and (S): how many it has in all."""
    slot_N = (slots_TK if kept_TK is None else slots_TK.where(kept_TK, num_slots)).flatten()
    _, place_N = _sorted(slot_N)
    rows_per_slot = count(slot_N, num_slots + 1)[:num_slots]
    first_S = rows_per_slot.cumsum(0) - rows_per_slot
    return place_N.view(slots_TK.shape) - first_S[slots_TK], rows_per_slot


def _firsts(mask_TK: Bool[Tensor, "T K"]) -> Int[Tensor, " T"]:
    """How many elements are True before each row."""
    many_T = mask_TK.sum(1)
    return many_T.cumsum(0) - many_T


def _sorted(slot_N: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """The permutation that sorts stably, and its inverse."""
    order_N = slot_N.argsort(stable=True)
    number_N = torch.arange(len(order_N), device=order_N.device)
    return order_N, torch.empty_like(order_N).scatter_(0, order_N, number_N)
