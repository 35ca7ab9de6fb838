"""Balancing in each step, as UltraEP and SYMI do it, beside planners that plan every 20 steps, on recorded loads.

    python benchmarks/placement/record_traces.py FOLDER      twelve traces of two real runs, some ten minutes
    python benchmarks/placement/each_step.py FOLDER          the table, a minute or two

The loads are those of small models. So that weights weigh as much beside rows as in a large one, each is multiplied by
a whole number that gives a rank 8,192 rows in a step or a little more, and experts have 6 million parameters: bfloat16
weights, float32 moments and master weights, rows of 4 KiB each way, a microsecond per row, a link of 200 Gbit/s.
`borrow` plans for the step's own load, which is known after routing; `rebuild` for that of the step before, into slots
whose weights are sent anew in each step; the others for the last window, without the guard. One spare slot per rank for
`replicate`, `borrow` and `rebuild`. The time of planning is left out of all. Writes benchmarks/results/each_step.json.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.experts.layer.routing_log import RowBytes
from toolkit.experts.placement.cost_model import CostModel, LayerSeconds
from toolkit.experts.placement.loads import Floats, Ints, max_over_mean, shares
from toolkit.experts.placement.placement import ExpertPlacement, initial_placement
from toolkit.experts.placement.planners import replicate
from toolkit.experts.placement.traffic import rows_between_ranks
from toolkit.experts.routing.traces import read_trace
from toolkit.lab.report import STAY, Case, Rules, case_of_trace, try_planner
from toolkit.lab.simulate import simulate

RULES = Rules(every=20)
ROWS = 8192
EXPERT = 3 * 2048 * 1024
"""Parameters."""


EVEN = 1e-3
"""Part of a rank's mean load below which nothing is borrowed."""


@dataclass(frozen=True)
class Borrowing:
    """The plan of one layer for one step."""

    share_ER: Floats
    """The part of each expert's rows that each rank computes."""
    borrowed_RR: Ints
    """Of how many experts of each rank each rank borrows the weights."""


def borrow(load_E: NDArray[Any], home: ExpertPlacement, spare_slots: int) -> Borrowing:
    """Where rows go if each rank may borrow `spare_slots` experts: as many rows of the busiest rank's busiest expert as
    it has too many go to the rank with the least load that has a slot left, until ranks are even or slots are used up.

    `home` has no replicas.
    """
    share_ER = shares(home)
    rows_ER = np.asarray(load_E, dtype=np.float64)[:, None] * share_ER
    load_R = rows_ER.sum(0)
    mean = float(load_R.mean())
    free_R = np.full(home.ranks, spare_slots)
    borrowed_RR = np.zeros((home.ranks, home.ranks), dtype=np.int64)
    owner_E = share_ER.argmax(1)
    while free_R.any():
        busiest = int(load_R.argmax())
        lightest = int(np.where(free_R > 0, load_R, np.inf).argmin())
        most = min(load_R[busiest] - mean, mean - load_R[lightest])
        if most <= EVEN * mean:
            break
        expert = int(np.where(owner_E == busiest, rows_ER[:, busiest], -1.0).argmax())
        rows = min(most, float(rows_ER[expert, busiest]))
        rows_ER[expert, [busiest, lightest]] += [-rows, rows]
        load_R[[busiest, lightest]] += [-rows, rows]
        free_R[lightest] -= 1
        borrowed_RR[busiest, lightest] += 1
    total_E = rows_ER.sum(1, keepdims=True)
    return Borrowing(np.where(total_E > 0, rows_ER / np.where(total_E > 0, total_E, 1), share_ER), borrowed_RR)


EachStep = Literal["borrow", "rebuild"]
"""`borrow`, as UltraEP does: plan for this step's load and borrow weights for it. `rebuild`, as SYMI does: optimizer
state is cut over all ranks, so that each slot gets its weights anew in each step whatever expert it holds; which one
follows from the load of the step before."""


def try_each_step(case: Case, kind: EachStep, *, rules: Rules) -> dict[str, Any]:
    """Imbalance, bytes per step and predicted time of a step, of the steps after the first window, as in
    `try_planner`. The time of planning is not counted, and `rules.spare_slots` are one at least."""
    load_TLSE = case.load_TLSE
    steps, layers, ranks, _ = load_TLSE.shape
    layer_seconds = 0.0
    imbalances = []
    moved = 0
    for layer in range(layers):
        cost_model = rules.cost_model(case, layer)
        for step in range(rules.every, steps):
            before_SE, load_SE = load_TLSE[step - 1, layer], load_TLSE[step, layer]
            found, load_R, sent = (_borrow if kind == "borrow" else _rebuild)(before_SE, load_SE, cost_model, rules)
            layer_seconds += float(found.total)
            imbalances.append(float(max_over_mean(load_R)))
            moved += sent
    start = initial_placement(case.load_TLSE.shape[3], ranks, rules.initial_placement)
    costs = [rules.cost_model(case, layer) for layer in range(layers)]
    rest = simulate(load_TLSE[rules.every :], [start] * layers, costs, rules.machine)
    seconds = layer_seconds + float((rest.dense_T + rest.optimizer_T).sum())
    return {
        "case": case.name,
        "planner": kind,
        "imbalance": float(np.mean(imbalances)),
        "MB a step": moved / (steps - rules.every) / 1e6,
        "step ms": 1e3 * seconds / (steps - rules.every),
    }


Found = tuple[LayerSeconds, NDArray[Any], int]
"""Seconds, rows of each rank, and bytes that were sent, without those of rows."""


def _borrow(_: NDArray[Any], load_SE: NDArray[Any], cost_model: CostModel, rules: Rules) -> Found:
    ranks, experts = load_SE.shape
    spare = max(1, rules.spare_slots)
    plan = borrow(load_SE.sum(0), initial_placement(experts, ranks, rules.initial_placement), spare)
    rows_SR = load_SE @ plan.share_ER
    weights_RR = plan.borrowed_RR * cost_model.weight_bytes
    slots = [slots + spare for slots in initial_placement(experts, ranks, rules.initial_placement).slots_per_rank]
    return cost_model.seconds_of_rows(rows_SR, slots, weights_RR), rows_SR.sum(0), 2 * int(weights_RR.sum())


def _rebuild(before_SE: NDArray[Any], load_SE: NDArray[Any], cost_model: CostModel, rules: Rules) -> Found:
    ranks, experts = load_SE.shape
    start = initial_placement(experts, ranks, rules.initial_placement, spare_slots=max(1, rules.spare_slots))
    placement = replicate(before_SE.sum(0), start)
    rows_SR = rows_between_ranks(load_SE, placement)
    held_R = np.array([sum(expert >= 0 for expert in row) for row in placement.slots])
    # Each rank has an equal part of the optimizer state of every expert, and so sends that part of all weights.
    weights_RR = np.broadcast_to(held_R * cost_model.weight_bytes / ranks, (ranks, ranks)) * (1 - np.eye(ranks))
    found = cost_model.seconds_of_rows(rows_SR, placement.slots_per_rank, weights_RR)
    return found, rows_SR.sum(0), 2 * int(weights_RR.sum())


def enlarged(case: Case) -> Case:
    """The same choices, more often, of larger experts."""
    layers = len(case.row_bytes)
    factor = int(np.ceil(ROWS / case.load_TLSE.sum(-1).mean()))
    return replace(
        case,
        load_TLSE=case.load_TLSE * factor,
        row_bytes=(RowBytes(4096, 4096),) * layers,
        weight_bytes=(2 * EXPERT,) * layers,
        optimizer_bytes=(12 * EXPERT,) * layers,
    )


def rows_of(case: Case) -> list[dict[str, Any]]:
    rows = []
    for name in (STAY, "lpt", "swap", "few_swaps", "replicate"):
        found = try_planner(case, name, guarded=False, rules=RULES)
        planned = len(case.load_TLSE) - RULES.every
        rows.append({**found, "MB a step": found["MB moved"] / planned + found["replica MB"]})
    rows += [try_each_step(case, kind, rules=RULES) for kind in ("borrow", "rebuild")]
    return [
        {
            "case": case.name,
            "planner": row["planner"],
            "imbalance": round(row["imbalance"], 3),
            "MB a step": round(row["MB a step"], 1),
            "step ms": round(row["step ms"], 2),
            "x stay": round(row["step ms"] / rows[0]["step ms"], 3),
        }
        for row in rows
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of traces")
    paths = sorted(parser.parse_args().folder.glob("*.npz"))
    cases = [case_of_trace(path.stem, read_trace(path)) for path in paths]
    digests = {case.name: case.digest for case in cases}
    write_report(
        "each_step", [row for case in cases for row in rows_of(enlarged(case))], every=RULES.every, sha256=digests
    )
