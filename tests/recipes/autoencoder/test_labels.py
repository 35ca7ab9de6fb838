"""Which images have labels, which of those are wrong, and what is drawn at a visit."""

from __future__ import annotations

import pytest
import torch

from autoencoder.labels import UNLABELLED, FewLabels, balanced_rows, corrupted, with_noise
from toolkit.data.table import TensorTable
from toolkit.errors import UserError

IMAGES = 400
CLASSES = 4


def digits() -> TensorTable:
    draws = torch.Generator().manual_seed(0)
    return TensorTable(
        input=torch.randint(0, 256, (IMAGES, 2, 3), dtype=torch.uint8, generator=draws),
        label=torch.arange(IMAGES) % CLASSES,
    )


def few(**settings) -> FewLabels:
    return FewLabels(digits(), 40, num_classes=CLASSES, seed=3, **settings)


@pytest.mark.parametrize("count", [4, 10, 40, IMAGES])
def test_labels_are_spread_evenly_over_classes(count):
    labels = digits().columns["label"]
    rows = balanced_rows(labels, count, CLASSES, seed=0)
    shares = torch.bincount(labels[rows], minlength=CLASSES)
    assert len(rows.unique()) == count == int(shares.sum())
    assert int(shares.max() - shares.min()) <= 1


def test_the_labelled_images_are_fixed_by_the_seed():
    labels = digits().columns["label"]
    assert torch.equal(balanced_rows(labels, 40, CLASSES, seed=1), balanced_rows(labels, 40, CLASSES, seed=1))
    assert not torch.equal(balanced_rows(labels, 40, CLASSES, seed=1), balanced_rows(labels, 40, CLASSES, seed=2))


@pytest.mark.parametrize(
    ("count", "words"), [(3, "take 4 to 400"), (401, "take 4 to 400"), (300, "class 3 has only 20 images")]
)
def test_a_number_of_labels_that_cannot_be_had_is_refused(count, words):
    labels = torch.arange(IMAGES) % CLASSES
    if count == 300:
        labels[(labels == 3).nonzero()[20:, 0]] = 0
    with pytest.raises(UserError, match=words):
        balanced_rows(labels, count, CLASSES, seed=0)


def test_all_other_labels_are_out_of_reach():
    table = few().table
    known = table.columns["label"] != UNLABELLED
    assert int(known.sum()) == 40
    assert torch.equal(table.columns["label"][known], digits().columns["label"][known])


def test_no_number_of_labels_means_all():
    labels = FewLabels(digits(), None, num_classes=CLASSES, seed=3)
    assert torch.equal(labels.table.columns["label"], digits().columns["label"])


@pytest.mark.parametrize("rate", [0.0, 0.2, 1.0])
def test_fixed_corruption_makes_exactly_that_many_labels_wrong(rate):
    labels = digits().columns["label"]
    wrong = corrupted(labels, rate, CLASSES, seed=0)
    assert int((wrong != labels).sum()) == round(rate * IMAGES)
    assert wrong.min() >= 0
    assert wrong.max() < CLASSES
    if rate == 1.0:  # evenly: each of the three wrong classes about a third of the time
        assert torch.bincount((wrong - labels) % CLASSES, minlength=CLASSES)[1:].min() > 100


def visits_of_labelled(labels: FewLabels, epochs: int) -> torch.Tensor:
    return (torch.arange(epochs)[:, None] * IMAGES + labels.rows).flatten()


def test_fixed_corruption_says_the_same_at_each_visit():
    labels = few(rate=0.5, corruption="fixed")
    visits = visits_of_labelled(labels, epochs=3)
    seen = labels(labels.table[visits % IMAGES], visits)["label"].view(3, -1)
    assert (seen == labels.known).all()
    assert int((labels.known != digits().columns["label"][labels.rows]).sum()) == 20


def test_resampled_corruption_is_another_one_each_time_and_averages_out():
    labels = few(rate=0.3, corruption="resampled")
    visits = visits_of_labelled(labels, epochs=200)
    batch = labels(labels.table[visits % IMAGES], visits)
    seen, truth = batch["label"].view(200, -1), digits().columns["label"][labels.rows]
    assert (seen.mode(0).values == truth).all()
    assert abs((seen != truth).float().mean() - 0.3) < 0.02
    paired = (batch["paired_input"].flatten(1)[:, None] == labels.images.flatten(1)).all(-1).float().argmax(-1)
    assert abs((batch["paired_label"] != truth[paired]).float().mean() - 0.3) < 0.02


def test_each_visit_is_paired_with_a_labelled_image_and_its_label():
    labels = few()
    batch = labels(labels.table[torch.arange(IMAGES)], torch.arange(IMAGES))
    matches = (batch["paired_input"].flatten(1)[:, None] == labels.images.flatten(1)).all(-1)
    assert matches.any(1).all()
    assert torch.equal(batch["paired_label"], labels.known[matches.float().argmax(1)])
    assert matches.any(0).sum() > 30, "nearly all labelled images take part"


def test_what_is_drawn_at_a_visit_does_not_depend_on_how_a_batch_is_cut():
    labels = few(rate=0.5, noise_shape=(3,), directions=True)
    visits = torch.randperm(5 * IMAGES, generator=torch.Generator().manual_seed(0))[:64]
    whole = labels(labels.table[visits % IMAGES], visits)
    parts = [labels(labels.table[part % IMAGES], part) for part in (visits[:10], visits[10:10], visits[10:])]
    assert {"noise", "direction"} < set(whole)
    for name, column in whole.items():
        assert torch.equal(column, torch.cat([part[name] for part in parts])), name


def test_draws_are_standard_normal_and_new_at_each_visit():
    labels = few(noise_shape=(5,))
    noise = labels(labels.table[torch.arange(10_000) % IMAGES], torch.arange(10_000))["noise"]
    assert noise.shape == (10_000, 5)
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert len(noise.unique(dim=0)) == 10_000


def test_evaluations_draw_the_same_noise_each_time():
    first, second = (with_noise(digits(), (2,), seed=1).columns["noise"] for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (IMAGES, 2)
