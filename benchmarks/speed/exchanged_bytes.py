"""The bytes that dispatch and combine send, counted on real processes, beside those of a row for each assignment.

    python benchmarks/speed/exchanged_bytes.py          EP 2, 4 and 8, a minute on two cores

A row goes once to each rank that has experts of its token, and one returns; its gradients go the same way. The script
counts what a layer's forward and backward give to all-to-alls for other ranks. `predicted` is from the router's choices
alone: for each pair of a token and another rank that it visits, its row in float32 four times, and with it, once each
way, the router's weights and, on the first way, slots of four bytes. Exit code 1 where they differ. `by chance` is the
expected number of rows for uniform choices, on all ranks: `R * (1 - C(E - E/R, K) / C(E, K))` of `K` assignments.

Writes benchmarks/results/exchanged_bytes.json.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from tests.support.helpers import run_distributed
from toolkit.experts.layer.dispatcher import AllToAllDispatcher
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import contiguous

TOKENS = 4096
"""Over all processes."""
SHAPES = [(16, 2, 128), (64, 8, 256), (128, 8, 256)]
"""Experts, top-k, width."""


def counted(experts: int, top_k: int, dim: int) -> tuple[int, int, int]:
    """Of all ranks: bytes that were given to all-to-alls of rows for other ranks; pairs of a token and a rank that it
    visits; and those of them that are of another rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dispatcher = AllToAllDispatcher(contiguous(experts, world), make_expert_groups(world))
    torch.manual_seed(rank)
    x = torch.randn(TOKENS // world, dim, requires_grad=True)
    ids = torch.rand(len(x), experts).topk(top_k).indices
    weights = torch.rand(len(x), top_k, requires_grad=True)
    sent, exchange = 0, dist.all_to_all_single

    def counting(result: Tensor, rows: Tensor, received: Any = None, to: Any = None, **options: Any) -> Any:
        nonlocal sent
        if to is not None:  # else an exchange of counts
            sent += (len(rows) - to[rank]) * rows[0].numel() * rows.element_size()
        return exchange(result, rows, received, to, **options)

    with patch.object(dist, "all_to_all_single", counting):
        rows, dispatched = dispatcher.dispatch(x, ids, weights)
        dispatcher.combine(rows, dispatched).sum().backward()
    visits = torch.zeros(len(x), world).scatter_(1, ids // (experts // world), 1.0)
    numbers = torch.tensor([sent, int(visits.sum()), int(visits.sum() - visits[:, rank].sum())])
    dist.all_reduce(numbers)
    return tuple(numbers.tolist())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    rows, differs = [], False
    for experts, top_k, dim in SHAPES:
        for world in options.worlds:
            sent, visits, others = run_distributed(counted, world, experts, top_k, dim)[0]
            predicted = others * 4 * (4 * dim + 3 * top_k)
            before = TOKENS * top_k * (world - 1) // world * 4 * 4 * dim
            misses = math.comb(experts - experts // world, top_k) / math.comb(experts, top_k)
            differs |= sent != predicted
            rows.append(
                {
                    "experts": experts,
                    "top k": top_k,
                    "width": dim,
                    "EP": world,
                    "MB sent": round(sent / 1e6, 2),
                    "predicted": round(predicted / 1e6, 2),
                    "a row per assignment": round(before / 1e6, 2),
                    "rows, times fewer": round(TOKENS * top_k / visits, 2),
                    "by chance": round(top_k / (world * (1 - misses)), 2),
                }
            )
    write_report("exchanged_bytes", rows, tokens=TOKENS)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
