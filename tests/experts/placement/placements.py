"""Hypothesis strategies for placements and loads: uneven ranks, empty slots, replicas, idle experts."""

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement


@st.composite
def placements(draw: st.DrawFn, *, ranks: int | None = None) -> ExpertPlacement:
    sizes = draw(st.lists(st.integers(0, 5), min_size=ranks or 1, max_size=ranks or 6).filter(any))
    return random_placement(random.Random(draw(st.integers(0, 2**32 - 1))), sizes, draw(st.integers(1, sum(sizes))))


@st.composite
def placements_with_loads(draw: st.DrawFn) -> tuple[ExpertPlacement, list[float]]:
    placement = draw(placements())
    loads = st.one_of(st.integers(0, 5), st.integers(0, 100_000), st.floats(0, 1e308, allow_subnormal=False))
    experts = placement.num_experts
    return placement, [float(load) for load in draw(st.lists(loads, min_size=experts, max_size=experts))]


def random_placement(rng: random.Random, slots: Sequence[int], experts: int) -> ExpertPlacement:
    """Draw a placement on ranks with `slots` slots each; about half of the spare slots hold replicas."""
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
