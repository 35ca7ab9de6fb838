"""The rivals of dynamic experts on split MNIST: what they remember, what they learn, and the table."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learning.split_mnist import REFERENCE, RIVALS, Reservoir, affine, by_memory, learn, measured, table
from continual.streams import split_stream
from toolkit.data.images import ImageData, load_images
from toolkit.data.replay_memory import ReplayMemory


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load_images("digits", None, on_main=lambda decide: decide())


@pytest.mark.parametrize("arm", RIVALS)
def test_a_rival_learns_every_task_and_repeats_itself(arm: str, digits: ImageData):
    first, second = (measured(RIVALS[arm], digits, memory=200, seed=1) for _ in range(2))
    assert first["accuracies"] == second["accuracies"]
    assert len(first["accuracies"]) == 5
    assert first["average_accuracy"] > 0.5  # the last task alone: 0.2


def test_gdumb_learns_from_the_memory_alone(digits: ImageData):
    """The images that it does not remember can be anything."""
    stream = split_stream(digits)
    weights = learn(RIVALS["GDumb"], stream, digits, 100, 0).model.state_dict()
    unseen = torch.ones(len(stream.train), dtype=torch.bool)
    memory = ReplayMemory(stream.train, 100, seed=0)
    memory.add(torch.arange(len(stream.train)))
    unseen[memory.rows] = False
    stream.train.columns["input"][unseen] = 255
    again = learn(RIVALS["GDumb"], stream, digits, 100, 0).model.state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_reservoir_is_a_uniform_sample_with_its_logits():
    counts = torch.zeros(40)
    for seed in range(300):
        reservoir = Reservoir(10, seed)
        for rows in torch.arange(40).split(7):
            reservoir.add(rows, rows[:, None].float())
        assert torch.equal(reservoir.rows.float(), reservoir.logits[:, 0])
        counts[reservoir.rows] += 1
    assert counts.sum() == 3000
    assert counts.min() > 40  # 75 are expected, with a standard deviation of 7.5
    assert counts.max() < 115


def test_images_are_moved_a_little_and_stay_images():
    image = torch.zeros(64, 28, 28, dtype=torch.uint8)
    image[:, 10:18, 10:18] = 200
    draws = torch.Generator().manual_seed(0)
    moved = affine(image, draws)
    assert moved.shape == image.shape
    assert moved.dtype == torch.uint8
    assert not torch.equal(moved, affine(image, draws))
    # The sum of light changes with the area: scales of 0.85 to 1.15.
    ratios = moved.float().sum((1, 2)) / image.float().sum((1, 2))
    assert 0.6 < ratios.min() < ratios.max() < 1.5


def test_an_arm_is_better_beyond_two_standard_errors():
    def runs(*values: float) -> list[dict[str, float]]:
        return [{"average_accuracy": value, "seconds": 1.0} for value in values]

    found = {
        (REFERENCE, 200): runs(0.90, 0.91),
        ("GDumb", 200): runs(0.95, 0.96),
        ("ER", 200): runs(0.90, 0.92),
    }
    rows = table(found)
    assert [row["verdict"] for row in rows] == [None, "better", "equal"]
    assert by_memory(rows)[1] == {"arm": "GDumb", "200 images": "95.5 (0.7) +"}
