"""Operations on rows of tokens: their order, and copies, sums and all-to-alls with their backward passes.

None of them waits for the device: the number of rows of a result is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.experts.compat import embedding_bag_weights_grad, without_dynamo
from toolkit.experts.parallel.waits import waits

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# --- order ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copies:
    """Any number of copies of each row, in any order. Tensors are int64."""

    source: Int[Tensor, " copies"]
    """Row of each copy."""
    place: Int[Tensor, " copies"]
    """Places of the copies of row 0, then of row 1, and so on."""
    first: Int[Tensor, " rows"]
    """Index in `place` at which the places of each row begin."""


@dataclass(frozen=True, slots=True)
class SlotOrder(Copies):
    """One copy for each (token, expert) pair of this rank's slots, sorted by slot."""

    rows_per_slot: Int[Tensor, " S"]
    """Number of pairs of each slot."""
    pair: Int[Tensor, " copies"]
    """Pair of each copy, `row * K + choice`. The sort is stable."""
    kept: Int[Tensor, " copies"] | None
    """Pairs that have a copy, in ascending order. None: all."""


def visited(peer_TK: Int[Tensor, "T K"], peers: int) -> Bool[Tensor, "T peers"]:
    """Whether each token has an expert at each peer. Numbers outside of 0 to `peers` - 1 are no peer."""
    visits = torch.zeros(len(peer_TK), peers + 2, dtype=torch.bool, device=peer_TK.device)
    return visits.scatter_(1, (peer_TK + 1).clamp_(0, peers + 1), True)[:, 1:-1]


def copies_for_peers(visits: Bool[Tensor, "rows peers"], total: int) -> Copies:
    """A copy of each row for each peer that it visits, `total` in all: sorted by peer, then by row."""
    by_peer = visits.t().contiguous()
    place = by_peer.flatten().cumsum(0).view(by_peer.shape) - 1
    source = places_of_true(by_peer, total) % max(1, len(visits))
    return Copies(source, place.t().flatten().index_select(0, places_of_true(visits, total)), _firsts(visits))


def sort_by_slot(slots_TK: Int[Tensor, "T K"], num_slots: int, total: int) -> SlotOrder:
    """A copy of each row for each of its pairs, sorted by slot. Pairs of slots outside of 0 to `num_slots` - 1 have
    none; `total` have one.

        slots of t0: 1 0, of t1: 1 2    rows: t0 t1    ->    slot 0: t0, slot 1: t0 t1, slot 2: t1
    """
    top_k = slots_TK.shape[1]
    slot, kept = slots_TK.flatten(), None
    if total == slots_TK.numel():
        first = torch.arange(0, total, top_k, device=slot.device)
    else:
        here_TK = (slots_TK >= 0) & (slots_TK < num_slots)
        kept, first = places_of_true(here_TK, total), _firsts(here_TK)
        slot = slot.index_select(0, kept)
    order, place = _sorted(slot)
    pair = order if kept is None else kept.index_select(0, order)
    return SlotOrder(pair // top_k if top_k > 1 else pair, place, first, count(slot, num_slots), pair, kept)


def place_within_slot(slots_TK: Int[Tensor, "T K"], num_slots: int) -> tuple[Int[Tensor, "T K"], Int[Tensor, " S"]]:
    """Return the number of earlier pairs of the same slot, shape (T, K), and the number of pairs of each slot."""
    _, place_N = _sorted(slots_TK.flatten())
    rows_per_slot = count(slots_TK, num_slots)
    first_S = rows_per_slot.cumsum(0) - rows_per_slot
    return place_N.view(slots_TK.shape) - first_S[slots_TK], rows_per_slot


def count(
    slots: Int[Tensor, "*shape"], num_slots: int, kept: Bool[Tensor, "*shape"] | None = None
) -> Int[Tensor, " slots"]:
    """The number of (kept) pairs of each slot."""
    # Not bincount: on a GPU it reads the largest value first, which is a host sync.
    ones = torch.ones_like(slots) if kept is None else kept.to(slots.dtype)
    return slots.new_zeros(num_slots).scatter_add_(0, slots.flatten(), ones.flatten())


def places_of_true(mask: Bool[Tensor, "*shape"], total: int) -> Int[Tensor, " total"]:
    """Flat indices of the `total` elements of `mask` that are True."""
    return torch.nonzero_static(mask.flatten(), size=total).squeeze(1)


def _firsts(mask: Bool[Tensor, "rows columns"]) -> Int[Tensor, " rows"]:
    """The number of elements before each row that are True."""
    many = mask.sum(1)
    return many.cumsum(0) - many


def _sorted(slot: Int[Tensor, " pairs"]) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """The permutation that sorts stably, and its inverse."""
    order = slot.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


# --- copies and sums --------------------------------------------------------------------------------------------------


def sum_rows(rows: Tensor, place: Tensor, first: Tensor, weights: Tensor | None = None) -> Tensor:
    """The (weighted) sums of the rows at the places `place[first[0] : first[1]]`, `place[first[1] : first[2]]`, ..."""
    if not len(rows):  # no tokens, or all pairs were dropped
        return rows.new_zeros(len(first), rows.shape[1])
    # `nn.functional.embedding_bag` without its checks, which take as long as the sum of few rows.
    return torch.embedding_bag(rows.detach(), place, first, False, 0, False, weights)[0]


def sum_of_copies(rows: Tensor, place: Tensor, first: Tensor, factor: float) -> Tensor:
    """The sums of the rows at these places, times `factor`."""
    return sum_rows(rows, place, first, None if factor == 1 else rows.new_full(place.shape, factor))


class Copy(torch.autograd.Function):
    """Copies of rows. The backward pass multiplies by `factor`, and sums by gathering, not by scattered additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies, factor: float = 1.0) -> Tensor:
        ctx.save_for_backward(copies.place, copies.first)
        ctx.factor = factor
        return rows.index_select(0, copies.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        place, first = ctx.saved_tensors
        return sum_of_copies(grads[0].contiguous(), place, first, ctx.factor), None, None


class Sum(torch.autograd.Function):
    """The sum of the copies of each row: the transpose of `Copy`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.source)
        return sum_rows(rows, copies.place, copies.first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, *ctx.saved_tensors), None


class WeightedSum(torch.autograd.Function):
    """The sum of the copies of each row, weighted by the weights of their pairs. The backward pass multiplies the
    gradients of rows, and not of weights, by `factor`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights_TK: Float[Tensor, "T K"], order: SlotOrder, factor: float = 1.0
    ) -> Tensor:
        ctx.save_for_backward(rows, weights_TK, order.pair, order.source)
        ctx.factor = factor
        weights = weights_TK.flatten()
        if order.kept is not None:
            weights = weights.index_select(0, order.kept)
        return sum_rows(rows, order.place, order.first, weights.to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights_TK, pair, source = ctx.saved_tensors
        grad_weights_TK = torch.zeros_like(weights_TK, memory_format=torch.contiguous_format)
        if not len(rows):
            return rows, grad_weights_TK, None, None
        grad = grads[0].contiguous()
        weights = weights_TK.flatten().index_select(0, pair) * ctx.factor
        if rows.dtype == weights.dtype and rows.element_size() >= 4:
            number = torch.arange(len(source), device=source.device)
            grad_rows = sum_rows(grad, source, number, weights)
            grad_weights = embedding_bag_weights_grad(grad, rows, number, number, source)
        else:  # CUDA has no kernel for the gradients of weights in bfloat16
            grad_rows = grad.index_select(0, source)
            grad_weights = (grad_rows * rows).sum(dim=1, dtype=weights.dtype)
            grad_rows = grad_rows.mul_(weights.to(grad.dtype).unsqueeze(1))  # of one dtype the kernel is faster
        grad_weights_TK.view(-1).index_copy_(0, pair, grad_weights)
        return grad_rows, grad_weights_TK, None, None


@dataclass(frozen=True, slots=True)
class Pairs:
    """The (token, expert) pairs of rows for this rank's slots."""

    order: SlotOrder
    weights_RK: Float[Tensor, "R K"]
    """Routing weights."""
    ranks: int = 1
    """Ranks over whose batches the backward pass averages: it divides gradients of the experts' outputs by this number,
    and multiplies gradients of their inputs by it."""

    def permute(self, x_RD: Float[Tensor, "R D"]) -> Float[Tensor, "N D"]:
        """Return a copy of its row for each pair, sorted by slot."""
        return Copy.apply(x_RD, self.order, self.ranks)

    def unpermute(self, rows_ND: Float[Tensor, "N D"]) -> Float[Tensor, "R D"]:
        """Return the weighted sum of its pairs for each row."""
        return WeightedSum.apply(rows_ND, self.weights_RK, self.order, 1 / self.ranks)


# --- all-to-all -------------------------------------------------------------------------------------------------------

Columns = tuple[Tensor, ...]
"""Tensors (rows, ...) with the same number of rows."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of consecutive rows to and from each peer of a process group."""

    group: dist.ProcessGroup | None
    sent: list[int]
    received: list[int]

    def back(self) -> Sizes:
        """Sizes of the way back."""
        return Sizes(self.group, self.received, self.sent)


def all_to_all(
    columns: Columns, sizes: Sizes, copies: Copies | None = None, meanwhile: Callable[[], None] | None = None
) -> Columns:
    """Send rows to the peers of a group. The backward pass returns their gradients. A collective.

    Args:
        columns: Shapes (rows, ...): all columns of a row are one message.
        sizes: Rows for each peer and from each peer.
        copies: Copies of the rows to send, whose gradients are summed. None: the rows themselves.
        meanwhile: Called while the all-to-all is in flight. The backward pass of its operations runs while the
            gradients are in flight: among the nodes that are ready, autograd runs the one that was made last.

    Returns:
        The received rows, sorted by peer.
    """
    flight = _Flight(sizes)
    columns = _depart(flight, copies, *columns)
    if meanwhile is not None:
        meanwhile()
    return _arrive(flight, *columns)


class _Flight:
    """An all-to-all in flight between `Depart` and `Arrive`, and again in their backward passes."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self._work: dist.Work | None = None
        self._result: Tensor | None = None

    def begin(self, rows: Tensor, sizes: Sizes) -> Tensor:
        """Return the tensor that has the rows of the peers after `end`."""
        self._result = rows.new_empty(sum(sizes.received), rows.shape[1])
        self._work = dist.all_to_all_single(
            self._result, rows, sizes.received, sizes.sent, group=sizes.group, async_op=True
        )
        return self._result

    def end(self) -> Tensor:
        """The rows of the peers. On a GPU the stream waits for them, not the host."""
        work, result, self._work, self._result = self._work, self._result, None, None
        assert work is not None, "rows arrive once"
        assert result is not None
        waits.timed("experts", result.device, work.wait)
        return result


class Depart(torch.autograd.Function):
    """Begin an all-to-all. The outputs are the rows as they were sent; the backward pass waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, copies: Copies | None, *columns: Tensor) -> Columns:
        rows = pack(columns)
        if copies is not None:
            ctx.save_for_backward(copies.place, copies.first)
            rows = rows.index_select(0, copies.source)
        flight.begin(rows, flight.sizes)
        return _outputs(ctx, flight, rows, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        likes = [grad for grad in grads if grad.is_floating_point()]
        rows, copies = ctx.flight.end(), ctx.saved_tensors
        if not copies:
            found = unpack(rows, likes)
        elif len({like.dtype for like in likes}) == 1:  # in one sum
            found = sum_rows(rows.view(likes[0].dtype), *copies).split([like.shape[1] for like in likes], dim=1)
        else:
            found = tuple(sum_rows(column.contiguous(), *copies) for column in unpack(rows, likes))
        return None, None, *_with_none(grads, found)


class Arrive(torch.autograd.Function):
    """End an all-to-all. The backward pass begins to send the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *columns: Tensor) -> Columns:
        return _outputs(ctx, flight, flight.end(), columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent = [grad for grad in grads if grad.is_floating_point()]
        found = unpack(ctx.flight.begin(pack(sent), ctx.flight.sizes.back()), sent)
        if torch.is_anomaly_enabled():  # autograd then reads the results of a backward pass
            found = tuple(map(torch.zeros_like, found))
        return None, *_with_none(grads, found)


# torch.compile does not trace asynchronous collectives.
_depart = without_dynamo(lambda *inputs: Depart.apply(*inputs))
_arrive = without_dynamo(lambda *inputs: Arrive.apply(*inputs))


def _outputs(ctx: Any, flight: _Flight, rows: Tensor, columns: Columns) -> Columns:
    result = tuple(column.view_as(column) for column in unpack(rows, columns))
    ctx.flight = flight
    ctx.mark_non_differentiable(*(column for column in result if not column.is_floating_point()))
    return result


def _with_none(grads: Columns, found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients `found`, None for integer columns."""
    rest = iter(found)
    return tuple(next(rest) if grad.is_floating_point() else None for grad in grads)


def pack(columns: Sequence[Tensor]) -> Tensor:
    """The bytes of all columns side by side, uint8 (rows, bytes). One column is returned as it is.

    Wider types come first, and the number of bytes is a multiple of the widest, so that `unpack` returns views.
    """
    if len(columns) == 1:
        return columns[0].contiguous()
    # An empty column is contiguous with any strides, and a view as bytes needs those of (rows, width).
    whole = [column.contiguous().as_strided(column.shape, (column.shape[1], 1)) for column in columns]
    parts = [column.view(torch.uint8) for column in sorted(whole, key=Tensor.element_size, reverse=True)]
    if rest := sum(part.shape[1] for part in parts) % max(map(Tensor.element_size, columns)):
        parts.append(parts[0].new_zeros(len(parts[0]), max(map(Tensor.element_size, columns)) - rest))
    return torch.cat(parts, dim=1)


def unpack(rows: Tensor, likes: Sequence[Tensor]) -> Columns:
    """Views of the columns of `pack`, with the types and widths of `likes`."""
    if len(likes) == 1:
        return (rows,)
    result, first = list(likes), 0
    for index in sorted(range(len(likes)), key=lambda index: likes[index].element_size(), reverse=True):
        width = likes[index].shape[1] * likes[index].element_size()
        result[index] = rows[:, first : first + width].view(likes[index].dtype)
        first += width
    return tuple(result)
