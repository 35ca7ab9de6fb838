"""Balancing in each step, replayed on recorded loads, for comparison with planners that plan every so many steps."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.commands.lab.report import Case, Rules
from toolkit.commands.lab.simulate import simulate
from toolkit.experts.placement.cost_model import CostModel, LayerSeconds
from toolkit.experts.placement.each_step import borrow
from toolkit.experts.placement.imbalance import max_over_mean
from toolkit.experts.placement.placement import initial_placement
from toolkit.experts.placement.planners import replicate
from toolkit.experts.placement.traffic import rows_between_ranks

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
