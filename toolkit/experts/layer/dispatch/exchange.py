"""All-to-alls of rows between the ranks of an EP group, with backwards that send the gradients back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.experts.parallel.waits import waits


def exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send consecutive rows to each peer of `group`; returns those of all peers, peer by peer. A collective."""
    return waits.timed("experts", rows.device, _all_to_all, rows, sent, received, group)[0]


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: Any, *, is_async: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """The rows of the peers, and what to wait for before they are read where it `is_async`."""
    result = rows.new_empty(sum(received), rows.shape[1])
    rows = rows.contiguous()
    if not is_async:  # as torch.compile knows it
        dist.all_to_all_single(result, rows, received, sent, group=group)
        return result, None
    return result, dist.all_to_all_single(result, rows, received, sent, group=group, async_op=True)


class AllToAll(torch.autograd.Function):
    """Send consecutive rows to each peer of a group; the backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


class Travel:
    """An all-to-all of rows that `Depart` begins and `Arrive` ends; what is computed between overlaps with it.

        travel = Travel(sent, received, group)
        rows = Depart.apply(rows, travel)       # the same rows
        ...                                     # computed while they travel
        rows = Arrive.apply(rows, travel)       # those of the peers

    In the backward `Arrive` sends the gradients and `Depart` waits for them. Of the nodes that are ready, autograd runs
    the one that was made last: so the backward of what was computed between comes between, too.
    """

    def __init__(self, sent: list[int], received: list[int], group: Any):
        self.sent, self.received, self.group = sent, received, group
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def begin(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Returns what will hold the rows of the peers after `end`. A collective."""
        result, work = _all_to_all(rows, sent, received, self.group, is_async=True)
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

    rows: Tensor
    travel: Travel | None
    """None where they are there already."""


def depart(rows: Tensor, sent: list[int], received: list[int], group: Any, *, overlaps: bool) -> Travelling:
    """`exchange` with a backward, which `arrive` ends. What is computed between may overlap with it, if it `overlaps`;
    else rows are there when this returns, which is a little faster where nothing is computed between."""
    if overlaps and not torch.compiler.is_compiling():  # torch.compile traces no asynchronous collectives
        travel = Travel(sent, received, group)
        return Travelling(Depart.apply(rows, travel), travel)
    return Travelling(AllToAll.apply(rows, sent, received, group), None)


def arrive(travelling: Travelling) -> Tensor:
    """The rows of all peers, peer by peer."""
    rows, travel = travelling
    return rows if travel is None else Arrive.apply(rows, travel)


class Depart(torch.autograd.Function):
    """Begin a `Travel`. The backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        travel.begin(rows, travel.sent, travel.received)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return ctx.travel.end(), None


class Arrive(torch.autograd.Function):
    """End a `Travel`. The backward sends the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: Travel) -> Tensor:  # noqa: ARG004
        ctx.travel = travel
        return travel.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        travel = ctx.travel
        result = travel.begin(grads[0], travel.received, travel.sent)
        if torch.is_anomaly_enabled():  # autograd then reads what a backward returns
            return torch.zeros_like(result), None
        return result, None
