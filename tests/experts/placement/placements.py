"""Placements and loads for properties to hold on: uneven ranks, empty slots, replicas, experts without tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement


@st.composite
def placements(draw: st.DrawFn, *, replicas: bool = True, ranks: int | None = None) -> ExpertPlacement:
    sizes = draw(
        st.lists(st.integers(0, 5), min_size=ranks or 1, max_size=ranks or 6).filter(lambda sizes: sum(sizes) > 0)
    )
    experts = draw(st.integers(1, sum(sizes)))
    places = draw(st.permutations([rank for rank, size in enumerate(sizes) for _ in range(size)]))
    rows: list[list[int]] = [[] for _ in sizes]
    for expert, rank in enumerate(places[:experts]):
        rows[rank].append(expert)
    for rank in places[experts:]:
        wanted = draw(st.integers(0, experts - 1)) if replicas and draw(st.booleans()) else EMPTY_ROW
        rows[rank].append(EMPTY_ROW if wanted in rows[rank] else wanted)
    return ExpertPlacement(tuple(tuple(draw(st.permutations(row))) for row in rows))


@st.composite
def placements_with_loads(draw: st.DrawFn, *, replicas: bool = True) -> tuple[ExpertPlacement, list[float]]:
    placement = draw(placements(replicas=replicas))
    loads = st.one_of(st.integers(0, 5), st.integers(0, 100_000), st.floats(0, 1e308, allow_subnormal=False))
    experts = placement.num_experts
    return placement, [float(load) for load in draw(st.lists(loads, min_size=experts, max_size=experts))]


def random_placement(rng: random.Random, slots: Sequence[int], experts: int) -> ExpertPlacement:
    """`experts` anywhere on ranks with so many `slots`; about half of the slots left over hold copies."""
    places = [(rank, slot) for rank, size in enumerate(slots) for slot in range(size)]
    rng.shuffle(places)
    rows = [[EMPTY_ROW] * size for size in slots]
    for expert, (rank, slot) in enumerate(places[:experts]):
        rows[rank][slot] = expert
    for rank, slot in places[experts:]:
        wanted = rng.randrange(experts)
        if rng.random() < 0.5 and wanted not in rows[rank]:
            rows[rank][slot] = wanted
    return ExpertPlacement(tuple(tuple(row) for row in rows))
