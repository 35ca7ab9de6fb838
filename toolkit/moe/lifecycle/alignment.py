"""Which hidden unit of one expert does what which unit of another does.

Experts are sums over hidden units, so a permutation of them changes nothing an expert says and everything about the
mean of two experts' weights. Units are matched before weights are compared or averaged ("Git Re-Basin", Ainsworth et
al. 2022, arXiv 2209.04836, section 3.2), by the assignment that makes the matched units most alike in total.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Rows = Mapping[str, Tensor]
"""One expert's rows of the stacked parameters, by name: `up` (F or 2F, D) and `down` (F, D)."""


def units(rows: Rows) -> Tensor:
    """(F, P): what belongs to each hidden unit, side by side: of swiglu the gate's row, of both up's and down's.

    What enters a unit and what leaves it are brought to one scale, as a relu unit may have it in either.
    """
    down = rows["down"]
    entering = torch.cat(rows["up"].chunk(len(rows["up"]) // len(down)), dim=1)
    sizes = entering.norm(dim=1, keepdim=True), down.norm(dim=1, keepdim=True)
    even = (sizes[0] * sizes[1]).sqrt()
    return torch.cat([entering * (even / sizes[0].clamp(min=1e-12)), down * (even / sizes[1].clamp(min=1e-12))], dim=1)


def alignment(rows: Rows, other: Rows) -> Tensor:
    """int64 (F): `other`'s unit for each unit of `rows`."""
    likeness_FF = units(rows) @ units(other).T
    _, matched = linear_sum_assignment(likeness_FF.double().cpu().numpy(), maximize=True)
    return torch.from_numpy(matched)


def reordered(rows: Rows, order_F: Tensor) -> dict[str, Tensor]:
    """The same expert with its units in the order of `order_F`; works on optimizer rows alike."""
    hidden = len(order_F)
    return {
        name: torch.cat([part[order_F.to(part.device)] for part in value.split(hidden)]) for name, value in rows.items()
    }


def similarity(rows: Rows, other: Rows) -> float:
    """Cosine between two experts' units once they are matched: 1 for the same function in other words, about 0 for
    strangers."""
    mine, theirs = units(rows), units(other)[alignment(rows, other)]
    return float((mine * theirs).sum() / (mine.norm() * theirs.norm()).clamp(min=1e-12))
