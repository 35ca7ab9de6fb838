"""Assignments in order of the slots they go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """N = T * K assignments, numbered token * K + choice, sorted by slot. Tensors are int64, `kept_TK` is bool."""

    rows_per_slot: Int[Tensor, " S"]
    """(S): the number of assignments of each slot."""
    assignment_N: Int[Tensor, " N"]
    """The assignment at each place of the sorted order; the sort is stable."""
    token_N: Int[Tensor, " N"]
    """The token of that assignment."""
    place_TK: Int[Tensor, "T K"]
    """The place of each assignment: the inverse permutation of `assignment_N`."""
    kept_TK: Bool[Tensor, "T K"] | None = None
    """False for dropped assignments; None if none is dropped."""

    def without_dropped(self, rows: int) -> SlotOrder:
        """The first `rows` places, those of kept assignments; dropped ones have place 0 and weight 0."""
        assert self.kept_TK is not None
        place_TK = self.place_TK.where(self.kept_TK, 0)
        return replace(self, assignment_N=self.assignment_N[:rows], token_N=self.token_N[:rows], place_TK=place_TK)

    def split(self, tokens: Sequence[int], rows: Sequence[int]) -> list[SlotOrder]:
        """The order of each chunk of tokens, where the first slots are those of the first chunk, and so on.

        `tokens` and `rows`: tokens and kept assignments of each chunk. Chunks have equally many slots.
        """
        top_k, chunks = self.place_TK.shape[1], len(tokens)
        parts, first_token, first_row = [], 0, 0
        kept = [None] * chunks if self.kept_TK is None else self.kept_TK.split(list(tokens))
        slots = self.rows_per_slot.view(chunks, -1)
        for chunk, (place_TK, kept_TK) in enumerate(zip(self.place_TK.split(list(tokens)), kept, strict=True)):
            here = slice(first_row, first_row + rows[chunk])
            parts.append(
                SlotOrder(
                    slots[chunk],
                    self.assignment_N[here] - first_token * top_k,
                    self.token_N[here] - first_token,
                    (place_TK - first_row).clamp_(min=0),  # those of dropped ones were 0 before
                    kept_TK,
                )
            )
            first_token += tokens[chunk]
            first_row += rows[chunk]
        return parts


def sort_by_slot(slots_TK: Int[Tensor, "T K"], num_slots: int, kept_TK: Bool[Tensor, "T K"] | None = None) -> SlotOrder:
    """Count assignments per slot and sort them stably by slot, dropped ones last. No host sync."""
    if kept_TK is not None:
        order = sort_by_slot(slots_TK.where(kept_TK, num_slots), num_slots + 1)
        return replace(order, rows_per_slot=order.rows_per_slot[:num_slots], kept_TK=kept_TK)
    slot_N = slots_TK.flatten()
    top_k = slots_TK.shape[1]
    assignment_N = slot_N.argsort(stable=True)
    place_N = torch.empty_like(assignment_N).scatter_(
        0, assignment_N, torch.arange(len(assignment_N), device=assignment_N.device)
    )
    # Not bincount: on a GPU it asks for the largest value first, which is a host sync.
    rows_per_slot = slot_N.new_zeros(num_slots).scatter_add_(0, slot_N, torch.ones_like(slot_N))
    return SlotOrder(
        rows_per_slot, assignment_N, assignment_N // top_k if top_k > 1 else assignment_N, place_N.view(slots_TK.shape)
    )


def place_within_slot(
    slots_TK: Int[Tensor, "T K"], num_slots: int, kept_TK: Bool[Tensor, "T K"] | None = None
) -> tuple[Int[Tensor, "T K"], Int[Tensor, " S"]]:
    """(T, K): how many earlier assignments the same slot has; and (S): how many it has in all."""
    order = sort_by_slot(slots_TK, num_slots, kept_TK)
    first_S = order.rows_per_slot.cumsum(0) - order.rows_per_slot
    return order.place_TK - first_S[slots_TK], order.rows_per_slot


def order_of_arrivals(rows_PS: Int[Tensor, "P S"], total: int) -> SlotOrder:
    """The order by slot of `total` rows that arrive peer by peer, in order of slots within a peer: each is an
    assignment of its own, numbered as it arrives. Of a slot, the rows of earlier peers are first.

    `rows_PS`: the rows that each of P peers sends for each of S slots. The rows of one peer for one slot stay together,
    so what comes before them in either order says how far they move. No sort, no host sync.
    """
    peers, slots = rows_PS.shape
    by_peer, by_slot = rows_PS.flatten(), rows_PS.t().flatten()
    shift_PS = by_slot.cumsum(0).view(slots, peers).t() - by_peer.cumsum(0).view(peers, slots)
    row_R = torch.arange(total, device=rows_PS.device)
    arrival_R = row_R - shift_PS.t().flatten().repeat_interleave(by_slot, output_size=total)
    place_R = row_R + shift_PS.flatten().repeat_interleave(by_peer, output_size=total)
    return SlotOrder(rows_PS.sum(0), arrival_R, arrival_R, place_R.unsqueeze(1))
