"""Draws of a visit, and blanked pixels: as many as asked for, others at each visit, the same on any number of ranks."""

from itertools import islice

import pytest
import torch

from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.data.visit_draws import BlankPixels, VisitDraws

SAMPLES, BATCH = 10, 4


def make_batches(rank: int = 0, world_size: int = 1, accumulation: int = 1) -> TrainBatches:
    return TrainBatches(
        TensorTable(input=torch.full((SAMPLES, 20, 20), 200, dtype=torch.uint8), label=torch.arange(SAMPLES)),
        batch_size=BATCH,
        seed=0,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        augment=BlankPixels(0.25, shape=(20, 20), grey=33, seed=0),
    )


def seen(steps: int, start: int = 0, **layout: int) -> dict[int, list[torch.Tensor]]:
    """The images of each label in the order of their steps."""
    images: dict[int, list[torch.Tensor]] = {}
    for micro_batches in islice(make_batches(**layout).steps(start), steps):
        for batch in micro_batches:
            for label, image in zip(batch["label"].tolist(), batch["input"], strict=True):
                images.setdefault(label, []).append(image)
    return images


def test_draws_are_a_function_of_the_visit_and_visits_run_through_all_of_them():
    draws = VisitDraws(torch.arange(101))
    visits = torch.arange(1000)
    assert torch.equal(draws(visits)[[7, 300]], draws(visits[[7, 300]]))
    assert len(draws(visits).unique()) == 101


def test_the_fraction_is_hidden_and_the_rest_is_as_it_was():
    images = torch.stack([image for visits in seen(30).values() for image in visits])
    assert set(images.unique().tolist()) == {33, 200}
    assert (images == 33).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_each_visit_hides_other_pixels():
    for visits in seen(9).values():
        first, second, third = visits
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_hidden_does_not_depend_on_the_ranks(world_size: int, accumulation: int):
    alone = seen(6)
    for rank in range(world_size):
        for label, visits in seen(6, rank=rank, world_size=world_size, accumulation=accumulation).items():
            assert all(any(torch.equal(image, other) for other in alone[label]) for image in visits)


def test_a_resumed_run_sees_the_same_images():
    whole, rest = seen(9), seen(5, start=4)
    for label, visits in rest.items():
        assert all(torch.equal(a, b) for a, b in zip(visits, whole[label][-len(visits) :], strict=True))
