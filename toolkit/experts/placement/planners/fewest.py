"""A beam search over exchanges of few experts, and two ways to choose from the placements that it finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from toolkit.experts.placement.loads import Floats, Ints
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.placement.planners.packing import NO_GAIN, PackingState

POWER = 16
"""Exponent of the power mean that measures unevenness: close to the maximum, but ranks nearly as busy count too,
because they may be the busiest next."""
WIDTH, PATIENCE = 16, 3
"""Placements kept after each exchange (the beam), and exchanges without progress after which the search stops."""


def unevenness(load_R: Floats) -> Floats:
    """Returns the power mean of the ranks' loads over their mean, along the last axis: 1 where all are equal."""
    mean = load_R.mean(-1, keepdims=True)
    return np.asarray(((load_R / mean) ** POWER).mean(-1) ** (1 / POWER))


@dataclass(frozen=True, slots=True)
class Level:
    """Placements with the same number of exchanges from the start, the most even one first."""

    held_BG: Ints
    """What each slot holds, named by the slot where it was at the start."""
    load_BR: Floats
    """The load over the mean of all ranks."""
    moves_B: Ints
    """Experts that have moved: one into an empty slot, two by an exchange."""


def even_placements(packing: PackingState, *, max_moves: int | None = None) -> Iterator[Level]:
    """Searches in a beam from the present placement: yields the placements after no exchange, one, two, and so on. Each
    level tries every exchange on every placement of the last, and keeps `WIDTH`. Ends when nothing becomes more even,
    or at `max_moves`.

    No rank is ever loaded above the busiest one at the start. `packing` has load, and no replicas.
    """
    mean = float(packing.load_R.mean())
    weight_G = packing.weight_G / mean
    rank_G = packing.rank_G
    moving_G = (packing.expert_G != EMPTY_ROW).astype(np.int64)
    i_X, j_X = np.nonzero(rank_G[:, None] < rank_G)
    # Ties go to the lowest ids, and to empty slots before all.
    ids_2X = np.sort(packing.expert_G[[i_X, j_X]], axis=0)
    by_id_X = np.lexsort((ids_2X[1], ids_2X[0]))
    i_X, j_X = i_X[by_id_X], j_X[by_id_X]
    p_X = rank_G[i_X]
    q_X = rank_G[j_X]
    most = len(rank_G) if max_moves is None else max_moves
    held_BG: Ints = np.arange(len(rank_G))[None]
    load_BR: Floats = packing.load_R[None] / mean
    moves_B: Ints = np.zeros(1, dtype=np.int64)
    highest = float(load_BR.max()) * (1 + NO_GAIN)
    best = float(unevenness(load_BR)[0])
    stale = 0
    while stale < PATIENCE:
        yield Level(held_BG, load_BR, moves_B)
        shift_BX = weight_G[held_BG[:, i_X]] - weight_G[held_BG[:, j_X]]
        p_BX = np.abs(load_BR[:, p_X] - shift_BX)
        q_BX = np.abs(load_BR[:, q_X] + shift_BX)
        powers_BR = load_BR**POWER
        score_BX = powers_BR.sum(1)[:, None] - powers_BR[:, p_X] - powers_BR[:, q_X] + p_BX**POWER + q_BX**POWER
        after_BX = moves_B[:, None] + moving_G[held_BG[:, i_X]] + moving_G[held_BG[:, j_X]]
        score_BX[(np.maximum(p_BX, q_BX) > highest) | (after_BX > most) | (shift_BX == 0)] = np.inf
        # Placements of equal score are nearly always the same exchanges in another order: keep one.
        scores, first = np.unique(score_BX.round(12), return_index=True)
        first = first[np.isfinite(scores)][:WIDTH]
        if not len(first):
            return
        b, x = np.divmod(first, len(i_X))
        rows = np.arange(len(b))
        held_BG, load_BR, moves_B = held_BG[b], load_BR[b], after_BX[b, x]
        held_BG[rows, i_X[x]], held_BG[rows, j_X[x]] = held_BG[rows, j_X[x]], held_BG[rows, i_X[x]]
        load_BR[rows, p_X[x]] = p_BX[b, x]
        load_BR[rows, q_X[x]] = q_BX[b, x]
        score = float(unevenness(load_BR)[0])
        best, stale = (score, 0) if score < best - NO_GAIN else (best, stale + 1)


def fewest_exchanges(
    packing: PackingState, like: PackingState, *, tolerance: float, max_moves: int | None
) -> ExpertPlacement | None:
    """Returns the first placement of the search whose imbalance and unevenness are within `tolerance` of those of
    `like`. Where there is none, the most even one within `max_moves`, if they are limited; else None."""
    wanted = float(unevenness(like.load_R)) + tolerance
    enough = max(1.0, like.imbalance + tolerance)
    best, best_held_G = np.inf, None
    for level in even_placements(packing, max_moves=max_moves):
        score = float(unevenness(level.load_BR)[0])
        top = float(level.load_BR[0].max())
        if top <= enough and score <= wanted:
            return packing.placement(level.held_BG[0])
        if score < best - NO_GAIN:
            best = score
            best_held_G = level.held_BG[0]
    return None if max_moves is None else packing.placement(best_held_G)


def worthwhile_exchanges(packing: PackingState, *, gain: float) -> ExpertPlacement:
    """Returns the exchanges that together lower the unevenness most, less `gain` for every two experts that move."""
    best, best_held_G = np.inf, None
    for level in even_placements(packing):
        cost = float(unevenness(level.load_BR)[0]) + gain * int(level.moves_B[0]) / 2
        if cost < best - NO_GAIN:
            best = cost
            best_held_G = level.held_BG[0]
    return packing.placement(best_held_G)
