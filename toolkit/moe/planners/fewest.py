"""The fewest exchanges between few experts that make a load as even as another placement would."""

from __future__ import annotations

import numpy as np

from toolkit.moe.placement import ExpertPlacement
from toolkit.moe.planners.board import NO_GAIN, Board, Floats, Ints
from toolkit.parallel import EMPTY_ROW

POWER = 16
"""Of the mean by which loads are compared: nearly the busiest rank alone, but ranks that come close to it count too,
since each of them may be the busiest one next."""
WIDTH, PATIENCE = 16, 3
"""How many placements are followed up after each exchange, and for how many exchanges without progress."""


def unevenness(load_R: Floats) -> Floats:
    """The power mean of the ranks' loads over their mean, along the last axis: 1 where all are alike."""
    mean = load_R.mean(-1, keepdims=True)
    return np.asarray(((load_R / mean) ** POWER).mean(-1) ** (1 / POWER))


def fewest_exchanges(
    board: Board, like: Board, *, tolerance: float, target: float, max_moves: int | None
) -> ExpertPlacement | None:
    """A beam search from where experts are: all that one exchange can do to the most even placements after the last.

    Takes the first placement on its way whose imbalance and unevenness are within `tolerance` of those of `like`, or
    whose imbalance is `target`. Where there is none, the most even one within `max_moves`, if they are limited; else
    None. No rank ever bears more than the busiest one did at the start. A move into an empty slot counts as one of
    `max_moves`, an exchange as two. `board` has load, and no replicas.
    """
    mean = float(board.load_R.mean())
    weight_G, rank_G, moving_G = board.weight_G / mean, board.rank_G, (board.expert_G != EMPTY_ROW).astype(np.int64)
    i_X, j_X = np.nonzero(rank_G[:, None] < rank_G)
    # Ties go to the lowest ids, and to empty slots before all.
    ids_2X = np.sort(board.expert_G[[i_X, j_X]], axis=0)
    by_id_X = np.lexsort((ids_2X[1], ids_2X[0]))
    i_X, j_X = i_X[by_id_X], j_X[by_id_X]
    p_X, q_X = rank_G[i_X], rank_G[j_X]
    most = len(rank_G) if max_moves is None else max_moves
    # Of each placement: what lies in each slot, named by the slot where it began; the ranks' loads; moves so far.
    held_BG: Ints = np.arange(len(rank_G))[None]
    load_BR: Floats = board.load_R[None] / mean
    moves_B: Ints = np.zeros(1, dtype=np.int64)
    highest = float(load_BR.max()) * (1 + NO_GAIN)
    wanted, enough = float(unevenness(like.load_R)) + tolerance, max(target, like.imbalance + tolerance)
    best, best_held_G, stale = float(unevenness(load_BR)[0]), held_BG[0], 0
    while stale < PATIENCE:
        top = float(load_BR[0].max())
        if top <= target or (top <= enough and unevenness(load_BR[0]) <= wanted):
            return board.placement(held_BG[0])
        shift_BX = weight_G[held_BG[:, i_X]] - weight_G[held_BG[:, j_X]]
        p_BX, q_BX = np.abs(load_BR[:, p_X] - shift_BX), np.abs(load_BR[:, q_X] + shift_BX)
        powers_BR = load_BR**POWER
        score_BX = powers_BR.sum(1)[:, None] - powers_BR[:, p_X] - powers_BR[:, q_X] + p_BX**POWER + q_BX**POWER
        after_BX = moves_B[:, None] + moving_G[held_BG[:, i_X]] + moving_G[held_BG[:, j_X]]
        score_BX[(np.maximum(p_BX, q_BX) > highest) | (after_BX > most) | (shift_BX == 0)] = np.inf
        # Placements that score alike came about by the same exchanges in another order, nearly always: keep one.
        scores, first = np.unique(score_BX.round(12), return_index=True)
        first = first[np.isfinite(scores)][:WIDTH]
        if not len(first):
            break
        b, x = np.divmod(first, len(i_X))
        rows = np.arange(len(b))
        held_BG, load_BR, moves_B = held_BG[b], load_BR[b], after_BX[b, x]
        held_BG[rows, i_X[x]], held_BG[rows, j_X[x]] = held_BG[rows, j_X[x]], held_BG[rows, i_X[x]]
        load_BR[rows, p_X[x]], load_BR[rows, q_X[x]] = p_BX[b, x], q_BX[b, x]
        score = float(unevenness(load_BR)[0])
        stale += 1
        if score < best - NO_GAIN:
            best, best_held_G, stale = score, held_BG[0], 0
    return None if max_moves is None else board.placement(best_held_G)
