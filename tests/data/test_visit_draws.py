"""Random draws per sample access, and blanked pixels."""

from itertools import islice, pairwise

import pytest
import torch
from torch import Tensor

from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.data.visit_draws import BlankPixels, VisitDraws


def images_by_label(steps: int, start: int = 0, **layout: int) -> dict[int, list[Tensor]]:
    """Return the augmented images of each label in training order."""
    table = TensorTable(input=torch.full((10, 20, 20), 200, dtype=torch.uint8), label=torch.arange(10))
    augment = BlankPixels(0.25, shape=(20, 20), grey=33, seed=0)
    images: dict[int, list[Tensor]] = {}
    for micro_batches in islice(
        TrainBatches(table, batch_size=4, seed=0, augment=augment, **layout).steps(start), steps
    ):
        for batch in micro_batches:
            for label, image in zip(batch["label"].tolist(), batch["input"], strict=True):
                images.setdefault(label, []).append(image)
    return images


def test_draws_depend_only_on_the_visit_and_cover_all_values():
    draws = VisitDraws(torch.arange(101))
    visits = torch.arange(1000)
    assert torch.equal(draws(visits)[[7, 300]], draws(visits[[7, 300]]))
    assert len(draws(visits).unique()) == 101


def test_a_fraction_of_pixels_is_blanked_differently_in_each_epoch():
    by_label = images_by_label(30)
    images = torch.stack([image for visits in by_label.values() for image in visits])
    assert set(images.unique().tolist()) == {33, 200}
    assert (images == 33).float().mean().item() == pytest.approx(0.25, abs=0.01)
    for visits in by_label.values():
        assert not any(torch.equal(first, second) for first, second in pairwise(visits))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_blanked_pixels_do_not_depend_on_world_size(world_size: int, accumulation: int):
    single = images_by_label(6)
    for rank in range(world_size):
        images = images_by_label(6, rank=rank, world_size=world_size, accumulation=accumulation)
        for label, visits in images.items():
            assert all(any(torch.equal(image, other) for other in single[label]) for image in visits)


def test_resumed_batches_have_the_same_blanked_pixels():
    reference, resumed = images_by_label(9), images_by_label(5, start=4)
    for label, visits in resumed.items():
        assert torch.equal(torch.stack(visits), torch.stack(reference[label][-len(visits) :]))
