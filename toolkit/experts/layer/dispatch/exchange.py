"""All-to-alls of rows between the ranks of a group, with backwards that send the gradients back.

A row has one column, or several of different types, which travel as one message: a token's numbers, the weights of its
experts, their slots. Of a row that visits several peers, each gets a copy; in the backward the gradients of its copies
are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.experts.layer.dispatch.movement import sum_rows
from toolkit.experts.layer.dispatch.order import Copies
from toolkit.experts.parallel.waits import waits

Columns = tuple[Tensor, ...]
"""Tensors (R, ...) of equally many rows."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Consecutive rows to and from each peer of a group."""

    sent: list[int]
    received: list[int]
    group: Any

    def back(self) -> Sizes:
        """Those of the way back."""
        return Sizes(self.received, self.sent, self.group)


def _all_to_all(rows: Tensor, sizes: Sizes, *, is_async: bool = False) -> tuple[Tensor, dist.Work | None]:
    """The rows of the peers, and what to wait for before they are read where it `is_async`. A collective."""
    result = rows.new_empty(sum(sizes.received), rows.shape[1])
    if not is_async:  # as torch.compile knows it
        dist.all_to_all_single(result, rows, sizes.received, sizes.sent, group=sizes.group)
        return result, None
    work = dist.all_to_all_single(result, rows, sizes.received, sizes.sent, group=sizes.group, async_op=True)
    return result, work


def _exchange(rows: Tensor, sizes: Sizes) -> Tensor:
    return waits.timed("experts", rows.device, _all_to_all, rows, sizes)[0]


def _packed(columns: Sequence[Tensor]) -> Tensor:
    """(R, B) uint8: the bytes of all columns, side by side; one column as it is.

    Wider types come first, and B is a multiple of the widest, so that `_unpacked` can look at each as it is.
    """
    if len(columns) == 1:
        return columns[0].contiguous()
    parts = [column.contiguous().view(torch.uint8) for column in sorted(columns, key=_itemsize, reverse=True)]
    if rest := sum(part.shape[1] for part in parts) % max(map(_itemsize, columns)):
        parts.append(parts[0].new_zeros(len(parts[0]), max(map(_itemsize, columns)) - rest))
    return torch.cat(parts, dim=1)


def _unpacked(rows: Tensor, likes: Sequence[Tensor]) -> Columns:
    """Views of the columns of `_packed` rows, with the types and widths of `likes`."""
    if len(likes) == 1:
        return (rows,)
    result, first = list(likes), 0
    for index in sorted(range(len(likes)), key=lambda index: _itemsize(likes[index]), reverse=True):
        width = likes[index].shape[1] * _itemsize(likes[index])
        result[index] = rows[:, first : first + width].view(likes[index].dtype)
        first += width
    return tuple(result)


def _of_originals(rows: Tensor, likes: Sequence[Tensor], copies: Columns) -> Columns:
    """The columns of `_packed` rows, added up over the copies of each row, if these are copies: see `Copies`."""
    if not copies:
        return _unpacked(rows, likes)
    place_N, first_T = copies
    if len(likes) > 1 and len({like.dtype for like in likes}) == 1:  # in one sum
        rows = rows.view(likes[0].dtype)
        return sum_rows(rows, place_N, first_T).split([like.shape[1] for like in likes], dim=1)
    return tuple(sum_rows(column.contiguous(), place_N, first_T) for column in _unpacked(rows, likes))


def _copied(ctx: Any, copies: Copies | None, columns: Columns) -> Tensor:
    """`copies` of the `_packed` rows, of which the backward sums those of a row: see `_of_originals`."""
    rows = _packed(columns)
    if copies is None:
        return rows
    ctx.save_for_backward(copies.place_N, copies.first_T)
    return rows.index_select(0, copies.token_N)


def _itemsize(column: Tensor) -> int:
    return column.element_size()


class _Gradients:
    """What the backward of columns needs to know of them: only those of floating point have gradients."""

    def __init__(self, ctx: Any, columns: Columns):
        self.floating = [column.is_floating_point() for column in columns]
        ctx.mark_non_differentiable(*(column for column in columns if not column.is_floating_point()))

    def of(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return [grad for grad, floating in zip(grads, self.floating, strict=True) if floating]

    def fill(self, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """`grads`, and None for the others."""
        rest = iter(grads)
        return tuple(next(rest) if floating else None for floating in self.floating)


class AllToAll(torch.autograd.Function):
    """Send consecutive rows to each peer of a group; the backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, sizes: Sizes, copies: Copies | None, *columns: Tensor) -> Columns:
        rows = _copied(ctx, copies, columns)
        result = _unpacked(_exchange(rows, sizes), columns)
        ctx.sizes, ctx.gradients = sizes, _Gradients(ctx, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent = ctx.gradients.of(grads)
        rows = _exchange(_packed(sent), ctx.sizes.back())
        return None, None, *ctx.gradients.fill(_of_originals(rows, sent, ctx.saved_tensors))


class Travel:
    """An all-to-all of rows that `Depart` begins and `Arrive` ends; what is computed between overlaps with it.

        travel = Travel(sizes)
        columns = Depart.apply(travel, copies, *columns)       # the same rows
        ...                                                    # computed while they travel
        columns = Arrive.apply(travel, *columns)               # those of the peers

    In the backward `Arrive` sends the gradients and `Depart` waits for them. Of the nodes that are ready, autograd runs
    the one that was made last: so the backward of what was computed between comes between, too.
    """

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def begin(self, rows: Tensor, sizes: Sizes) -> Tensor:
        """Returns what will hold the rows of the peers after `end`. A collective."""
        result, work = _all_to_all(rows, sizes, is_async=True)
        assert work is not None
        self._under_way = work, result
        return result

    def end(self) -> Tensor:
        """The rows of the peers, when they have come. On a GPU the stream waits for them, and not the host."""
        assert self._under_way is not None, "rows arrive once, after they have departed"
        work, result = self._under_way
        self._under_way = None
        waits.timed("experts", result.device, work.wait)
        return result


class Travelling(NamedTuple):
    """Rows between `depart` and `arrive`."""

    columns: Columns
    travel: Travel | None
    """None where they are there already."""


def depart(columns: Columns, sizes: Sizes, copies: Copies | None = None, *, overlaps: bool) -> Travelling:
    """Send rows, or `copies` of them, with a backward. `arrive` ends both. What is computed between may overlap with
    it, if it `overlaps`; else rows are there when this returns, a little faster where nothing is computed between."""
    if overlaps and not torch.compiler.is_compiling():  # torch.compile traces no asynchronous collectives
        travel = Travel(sizes)
        return Travelling(Depart.apply(travel, copies, *columns), travel)
    return Travelling(AllToAll.apply(sizes, copies, *columns), None)


def arrive(travelling: Travelling) -> Columns:
    """The rows of all peers, peer by peer."""
    columns, travel = travelling
    return columns if travel is None else Arrive.apply(travel, *columns)


class Depart(torch.autograd.Function):
    """Begin a `Travel`. The backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, travel: Travel, copies: Copies | None, *columns: Tensor) -> Columns:
        rows = _copied(ctx, copies, columns)
        travel.begin(rows, travel.sizes)
        result = tuple(column.view_as(column) for column in _unpacked(rows, columns))
        ctx.travel, ctx.gradients = travel, _Gradients(ctx, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.travel.end()
        return None, None, *ctx.gradients.fill(_of_originals(rows, ctx.gradients.of(grads), ctx.saved_tensors))


class Arrive(torch.autograd.Function):
    """End a `Travel`. The backward sends the gradients."""

    @staticmethod
    def forward(ctx: Any, travel: Travel, *columns: Tensor) -> Columns:
        result = _unpacked(travel.end(), columns)
        ctx.travel, ctx.gradients = travel, _Gradients(ctx, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent = ctx.gradients.of(grads)
        columns = _unpacked(ctx.travel.begin(_packed(sent), ctx.travel.sizes.back()), sent)
        if torch.is_anomaly_enabled():  # autograd then reads what a backward returns
            columns = tuple(map(torch.zeros_like, columns))
        return None, *ctx.gradients.fill(columns)
