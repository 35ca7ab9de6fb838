"""All-to-alls of rows between the ranks of a group, with backwards that send the gradients back.

A row has one column, or several of different types, which travel as one message: a token's numbers, the weights of its
experts, their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def exchange(columns: Sequence[Tensor], sizes: Sizes) -> Columns:
    """Send consecutive rows to each peer; returns those of all peers, peer by peer. A collective."""
    return waits.timed("experts", columns[0].device, _all_to_all, columns, sizes)[0]


def _all_to_all(columns: Sequence[Tensor], sizes: Sizes, *, is_async: bool = False) -> tuple[Columns, dist.Work | None]:
    """The rows of the peers, and what to wait for before they are read where it `is_async`."""
    rows = _packed(columns)
    result = rows.new_empty(sum(sizes.received), rows.shape[1])
    work = None
    if is_async:
        work = dist.all_to_all_single(result, rows, sizes.received, sizes.sent, group=sizes.group, async_op=True)
    else:  # as torch.compile knows it
        dist.all_to_all_single(result, rows, sizes.received, sizes.sent, group=sizes.group)
    return _unpacked(result, columns), work


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


def _itemsize(column: Tensor) -> int:
    return column.element_size()


class AllToAll(torch.autograd.Function):
    """Send consecutive rows to each peer of a group; the backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, sizes: Sizes, *columns: Tensor) -> Columns:
        ctx.sizes, ctx.floating = sizes, [column.is_floating_point() for column in columns]
        result = exchange(columns, sizes)
        ctx.mark_non_differentiable(*(column for column in result if not column.is_floating_point()))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent = [grad for grad, floating in zip(grads, ctx.floating, strict=True) if floating]
        back = iter(exchange(sent, ctx.sizes.back()))
        return None, *(next(back) if floating else None for floating in ctx.floating)


class Travel:
    """An all-to-all of rows that `Depart` begins and `Arrive` ends; what is computed between overlaps with it.

        travel = Travel(sizes)
        columns = Depart.apply(travel, *columns)       # the same rows
        ...                                            # computed while they travel
        columns = Arrive.apply(travel, *columns)       # those of the peers

    In the backward `Arrive` sends the gradients and `Depart` waits for them. Of the nodes that are ready, autograd runs
    the one that was made last: so the backward of what was computed between comes between, too.
    """

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self._under_way: tuple[dist.Work, Columns] | None = None

    def begin(self, columns: Sequence[Tensor], sizes: Sizes) -> Columns:
        """Returns what will hold the rows of the peers after `end`. A collective."""
        result, work = _all_to_all(columns, sizes, is_async=True)
        assert work is not None
        self._under_way = work, result
        return result

    def end(self) -> Columns:
        """The rows of the peers, when they have come. On a GPU the stream waits for them, and not the host."""
        assert self._under_way is not None, "rows arrive once, after they have departed"
        work, result = self._under_way
        self._under_way = None
        waits.timed("experts", result[0].device, work.wait)
        return result


class Travelling(NamedTuple):
    """Rows between `depart` and `arrive`."""

    columns: Columns
    travel: Travel | None
    """None where they are there already."""


def depart(columns: Columns, sizes: Sizes, *, overlaps: bool) -> Travelling:
    """`exchange` with a backward, which `arrive` ends. What is computed between may overlap with it, if it `overlaps`;
    else rows are there when this returns, which is a little faster where nothing is computed between."""
    if overlaps and not torch.compiler.is_compiling():  # torch.compile traces no asynchronous collectives
        travel = Travel(sizes)
        return Travelling(Depart.apply(travel, *columns), travel)
    return Travelling(AllToAll.apply(sizes, *columns), None)


def arrive(travelling: Travelling) -> Columns:
    """The rows of all peers, peer by peer."""
    columns, travel = travelling
    return columns if travel is None else Arrive.apply(travel, *columns)


class Depart(torch.autograd.Function):
    """Begin a `Travel`. The backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, travel: Travel, *columns: Tensor) -> Columns:
        ctx.travel, ctx.floating = travel, [column.is_floating_point() for column in columns]
        travel.begin(columns, travel.sizes)
        result = tuple(column.view_as(column) for column in columns)
        ctx.mark_non_differentiable(*(column for column in result if not column.is_floating_point()))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        back = iter(ctx.travel.end())
        return None, *(next(back) if floating else None for floating in ctx.floating)


class Arrive(torch.autograd.Function):
    """End a `Travel`. The backward sends the gradients."""

    @staticmethod
    def forward(ctx: Any, travel: Travel, *columns: Tensor) -> Columns:
        ctx.travel, ctx.floating = travel, [column.is_floating_point() for column in columns]
        result = travel.end()
        ctx.mark_non_differentiable(*(column for column in result if not column.is_floating_point()))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        travel = ctx.travel
        sent = [grad for grad, floating in zip(grads, ctx.floating, strict=True) if floating]
        result = travel.begin(sent, travel.sizes.back())
        if torch.is_anomaly_enabled():  # autograd then reads what a backward returns
            result = tuple(map(torch.zeros_like, result))
        back = iter(result)
        return None, *(next(back) if floating else None for floating in ctx.floating)
