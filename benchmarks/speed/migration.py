"""Memory of experts on each rank, and time and memory of migrations.

    python benchmarks/speed/migration.py                both tables, about 20 seconds on two cores
    python benchmarks/speed/migration.py memory         bytes per rank with sharded and with replicated experts
    python benchmarks/speed/migration.py moves          seconds, bytes and peak memory of migrations

On gloo, one thread per rank, float32, AdamW. `memory` is the size of parameters, gradients and optimizer states of the
experts of one layer after a training step. `moves` migrates back and forth: times are medians over repetitions of the
slowest rank. `x bare` compares them with a ring in the same round, in which each rank sends the bytes of the busiest
rank to the next one in a single message. Peak memory is the additional allocation in torch's profiler. Writes
benchmarks/results/migration_<table>.json; exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from benchmarks.support.peak_memory import peak_bytes
from benchmarks.support.processes import run_distributed
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import owned
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.placement_options import InitialPlacement

DIM, HIDDEN, EXPERTS, TOP_K = 256, 512, 16, 2
WORLDS = (1, 2, 4)
REPETITIONS = 7
MOST_TIMES_EXPERT = 2.0
"""Target: peak memory of a migration, in units of one expert."""

Row = dict[str, Any]


def trained_layer(
    groups: ExpertGroups, placement: ExpertPlacement | InitialPlacement = "contiguous"
) -> tuple[MoE, torch.optim.AdamW, list[nn.Parameter]]:
    """Return a layer after a training step with its gradients, its optimizer and its expert parameters."""
    layer = make_moe(DIM, HIDDEN, EXPERTS, TOP_K, groups=groups, placement=placement, activation="swiglu")
    optimizer = torch.optim.AdamW(layer.parameters())
    rows = list(layer.expert_stack.parameters.values())
    layer(torch.randn(64, DIM)).square().mean().backward()
    GradientAverage(owned(rows)).finish()
    optimizer.step()
    return layer, optimizer, rows


def nbytes(optimizer: torch.optim.Optimizer, rows: list[nn.Parameter]) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and optimizer states of experts."""
    states = [value for p in rows for value in optimizer.state[p].values() if value.ndim]
    grads = [p.grad for p in rows if p.grad is not None]
    return sum(p.nbytes for p in rows), sum(g.nbytes for g in grads), sum(s.nbytes for s in states)


# --- memory ------------------------------------------------------------------------------------------------------


def bytes_per_rank(ep_size: int) -> tuple[int, int, int]:
    _, optimizer, rows = trained_layer(make_expert_groups(ep_size))
    return nbytes(optimizer, rows)


def memory() -> bool:
    rows, met = [], True
    for world in WORLDS:
        (replicated, *_) = run_distributed(bytes_per_rank, world, 1)
        ranks = run_distributed(bytes_per_rank, world, world)
        most = max(ranks, key=sum)
        met &= all(world * part == full for part, full in zip(most, replicated, strict=True))
        parts = dict(zip(("parameters", "gradients", "optimizer"), (round(n / 2**20, 2) for n in most), strict=True))
        share = sum(most) / sum(replicated)
        rows.append({"ranks": world, **{f"{k}, MiB": v for k, v in parts.items()}, "of the replicated run's": share})
    write_report("migration_memory", rows, dim=DIM, hidden=HIDDEN, experts=EXPERTS)
    return met


# --- moves -------------------------------------------------------------------------------------------------------


def placements(kind: str, ranks: int) -> tuple[ExpertPlacement, ExpertPlacement]:
    """Return the placements before and after a migration."""
    start = contiguous(EXPERTS, ranks)
    order = list(range(EXPERTS))
    if kind == "one swap":
        order[0], order[-1] = order[-1], order[0]
    else:
        random.Random(0).shuffle(order)
    per_rank = EXPERTS // ranks
    after = ExpertPlacement(tuple(tuple(order[first : first + per_rank]) for first in range(0, EXPERTS, per_rank)))
    if kind == "all experts, spare slots":
        rows = tuple((-1, -1, *row) for row in after.slots)
        return with_spare_slots(start, 2), ExpertPlacement(rows)
    return start, after


def move(kind: str, ep_size: int) -> Row:
    old, new = placements(kind, ep_size)
    groups = make_expert_groups(ep_size)
    layer, optimizer, rows = trained_layer(groups, old)
    weights, _, states = nbytes(optimizer, rows)
    one_expert = (weights + states) // len(old.slots[groups.ep_rank])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        report = migrate(layer.expert_stack, new, optimizer)
    busiest = torch.zeros(report.cost.busiest_rank_bytes, dtype=torch.uint8)
    arrived = torch.empty_like(busiest)
    seconds, bare = [], []
    for turn in range(2 * REPETITIONS):
        dist.barrier()
        seconds.append(_slowest(migrate(layer.expert_stack, new if turn % 2 else old, optimizer).seconds))
        dist.barrier()
        bare.append(_slowest(_ring(busiest, arrived)))
    peak = torch.tensor(peak_bytes(profile) / one_expert, dtype=torch.float64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    took = statistics.median(seconds)
    return {
        "ranks": ep_size,
        "migration": kind,
        "experts moved": report.cost.experts,
        "MiB": round(report.cost.bytes / 2**20, 1),
        "ms": round(1e3 * took, 1),
        "MB/s, all ranks": round(report.cost.bytes / took / 1e6),
        "x bare": round(statistics.median(s / b for s, b in zip(seconds, bare, strict=True)), 2),
        "peak memory / expert": round(peak.item(), 3),
    }


def _ring(sent: torch.Tensor, received: torch.Tensor) -> float:
    """Return the seconds of a ring exchange on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    started = time.perf_counter()
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return time.perf_counter() - started


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def moves() -> bool:
    kinds = ("one swap", "all experts", "all experts, spare slots")
    rows = [run_distributed(move, world, kind, world)[0] for world in WORLDS[1:] for kind in kinds]
    write_report("migration_moves", rows, dim=DIM, hidden=HIDDEN, experts=EXPERTS, repetitions=2 * REPETITIONS)
    return all(row["peak memory / expert"] <= MOST_TIMES_EXPERT for row in rows)


TABLES = {"memory": memory, "moves": moves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"{' or '.join(TABLES)}. Default: both")
    chosen = parser.parse_args().tables or list(TABLES)
    if unknown := set(chosen) - TABLES.keys():
        parser.error(f"unknown table {', '.join(sorted(unknown))}. Choose from: {', '.join(TABLES)}")
    met = [TABLES[name]() for name in chosen]
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
