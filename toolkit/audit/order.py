"""Comparison with the base: experts, rows of routers and halves in another order, of another scale, or of other values.

A sketch of each expert's matrix has `SKETCH` rows by `SKETCH` columns, evenly spaced in each half.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.audit.checkpoint import Checkpoint
from toolkit.audit.experts import Matrix, value_of
from toolkit.audit.findings import MOST_NAMED, Finding, named
from toolkit.audit.values import SKETCH, Summaries

NEAR = 0.5
"""An expert is another one's of the base if its distance to that is below this times the distance to its own."""
FAR = 1.2
"""An expert is none of the base's if its distance to each is above this times the norm: 1.41 for independent values."""
SCALE = 2.0
"""Ratio of norms that training from the base does not reach."""
GATE_UP = {"gate_proj.weight": "up_proj.weight", "w1.weight": "w3.weight", "w1": "w3", "fc1.weight": "fc3.weight"}
"""Gate -> the matrix that it multiplies, if they are not one tensor."""

Matrices = Mapping[tuple[str, str], Matrix]
"""By layer and name."""
Rows = NDArray[Any]


def check_order(
    layers: Mapping[str, Sequence[Matrix]],
    checkpoint: Checkpoint,
    summaries: Summaries,
    of_base: Matrices,
    base: Checkpoint,
    base_summaries: Summaries,
) -> Iterator[str | Finding]:
    """Find matrices that are nearer to another expert's of the base or its other half, and of other values or norms."""
    compared, is_equal = 0, True
    for layer, matrices in layers.items():
        both = {each.name: (each, of_base[layer, each.name]) for each in matrices if (layer, each.name) in of_base}
        swapped = _swapped_halves([ours for ours, _ in both.values()], summaries, of_base, base_summaries)
        moves: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
        aliens: dict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
        sketched = 0
        for name, (ours, theirs) in both.items():
            x, y = _sketches(ours, summaries), _sketches(theirs, base_summaries)
            if not (experts := sorted(x.keys() & y.keys())):
                continue
            sketched += 1
            places = [(place, theirs.places[e]) for e, place in ours.places.items() if e in theirs.places]
            is_equal = is_equal and all(summaries[x].digest == base_summaries[y].digest for x, y in places)
            moved, alien = compare(*(np.stack([of[expert].ravel() for expert in experts]) for of in (x, y)))
            if moved:
                moves[tuple((experts[i], experts[j]) for i, j in moved.items())].append(name)
            elif experts := [experts[i] for i in alien if experts[i] not in swapped]:
                pair = [value_of(files, of.places[experts[0]]) for files, of in ((checkpoint, ours), (base, theirs))]
                if all(value.is_floating_point() for value in pair):  # else a small change may change all of an integer
                    aliens[tuple(experts), _how(*pair)].append(name)
            yield from _check_norms(layer, ours, theirs, summaries, base_summaries)
        compared += bool(sketched)
        for pairs, names in moves.items():
            said = ", ".join(f"{ours} is {theirs}" for ours, theirs in pairs[:MOST_NAMED])
            more = f" and {len(pairs) - MOST_NAMED} more" if len(pairs) > MOST_NAMED else ""
            what = "experts are" if len(names) == sketched else f"{', '.join(names)} of experts is"
            yield Finding("order", f"{layer}: {what} in another order than in the base: {said}{more}", [])
        for (unlike, how), names in aliens.items():
            what = named(unlike) if len(names) == sketched else f"{', '.join(names)} of {named(unlike)}"
            yield Finding("order", f"{layer}: {what} {how}", [])
        if swapped and not moves:
            yield Finding("halves", f"{layer}: gate and up are swapped in {named(swapped)}", [])
    if compared:
        how = "bitwise equal to" if is_equal else "in the order of"
        yield f"experts, gates and ups of {compared} layers are {how} the base"


def compare(x_ED: Rows, y_ED: Rows) -> tuple[dict[int, int], list[int]]:
    """Return the rows of `x_ED` that are another row of `y_ED`, and those that are none of them."""
    distance_EE = np.sqrt(np.maximum((x_ED**2).sum(1)[:, None] + (y_ED**2).sum(1) - 2 * x_ED @ y_ED.T, 0))
    nearest_E, least_E = distance_EE.argmin(1), distance_EE.min(1)
    moved = np.flatnonzero(least_E < NEAR * distance_EE.diagonal() - 1e-6)
    alien = np.flatnonzero(least_E > FAR * np.linalg.norm(y_ED, axis=1))
    return {int(i): int(nearest_E[i]) for i in moved}, [int(i) for i in alien]


def _how(ours: Tensor, theirs: Tensor) -> str:
    """Return how a matrix differs from the base's."""
    x, y = (value.reshape(-1, value.shape[-1]).double() for value in (ours, theirs))
    for axis, what in ((0, "rows"), (1, "columns")):
        a, b = (value if axis == 0 else value.T for value in (x, y))
        half = torch.arange(len(a)).reshape(2, -1).T.reshape(-1) if len(a) % 2 == 0 else torch.arange(len(a))
        if (a - b[half]).norm() < NEAR * a.norm():
            return "alternates gate and up, which the base has one after the other"
        if (a[half] - b).norm() < NEAR * a.norm():
            return "has gate and up one after the other, which alternate in the base"
        norms = [value.norm(dim=1).sort().values for value in (a, b)]
        if (norms[0] - norms[1]).norm() < 1e-3 * norms[0].norm():
            return f"has its {what} in another order than the base"
    return "are like no expert of the base"


def _check_norms(layer: str, ours: Matrix, theirs: Matrix, summaries: Summaries, base: Summaries) -> Iterator[Finding]:
    ratios: dict[int, float] = {}
    for expert in ours.places.keys() & theirs.places.keys():
        x, y = summaries[ours.places[expert]].norm, base[theirs.places[expert]].norm
        if x and y and math.isfinite(x) and not 1 / SCALE < x / y < SCALE:
            ratios[expert] = x / y
    if ratios:
        some = ratios[min(ratios)]
        said = f"{layer}: {ours.name} has {some:.3g} times the norm of the base in {named(sorted(ratios))}"
        yield Finding("scale", said, sorted({ours.places[expert].tensor for expert in ratios}))


def _sketches(matrix: Matrix | None, summaries: Summaries) -> dict[int, Rows]:
    """Return the sketches of a matrix by expert; none without a matrix."""
    found = {} if matrix is None else {expert: summaries[place].sketch for expert, place in matrix.places.items()}
    return {expert: sketch for expert, sketch in found.items() if sketch is not None}


def _swapped_halves(matrices: Sequence[Matrix], summaries: Summaries, of_base: Matrices, base: Summaries) -> list[int]:
    """Return the experts whose gate is nearer to the base's up than to its gate."""
    swapped: set[int] = set()
    for matrix in matrices:
        ours, theirs = _sketches(matrix, summaries), _sketches(of_base.get((matrix.layer, matrix.name)), base)
        if "gate_up" in matrix.name or "w13" in matrix.name:
            swaps = [{e: np.roll(sketch, SKETCH // 2, axis) for e, sketch in theirs.items()} for axis in (0, 1)]
        elif (up := GATE_UP.get(matrix.name)) in {other.name for other in matrices}:
            swaps = [_sketches(of_base.get((matrix.layer, up)), base)]
        else:
            continue
        for of_swap in swaps:
            for expert in ours.keys() & theirs.keys() & of_swap.keys():
                own, other = (np.linalg.norm(ours[expert] - of[expert]) for of in (theirs, of_swap))
                if other < NEAR * own:
                    swapped.add(expert)
    return sorted(swapped)
