"""Labelled images, corrupted labels, and draws per sample access."""

import pytest
import torch

from autoencoder.labels import UNLABELLED, FewLabels, balanced_rows, corrupted
from toolkit.data.table import TensorTable
from toolkit.errors import UserError

IMAGES = 400
CLASSES = 4
LABELS = torch.arange(IMAGES) % CLASSES
DIGITS = TensorTable(
    input=torch.randint(0, 256, (IMAGES, 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
    label=LABELS,
)


def few(count=40, **settings):
    return FewLabels(DIGITS, count, num_classes=CLASSES, seed=3, **settings)


def batch_of(labels, accesses):
    return labels(labels.table[accesses % IMAGES], accesses)


def labelled_accesses(labels, epochs):
    return (torch.arange(epochs)[:, None] * IMAGES + labels.rows).flatten()


def paired_rows(labels, batch):
    """Return whether each labelled image (columns) is paired with each sample (rows)."""
    return (batch["paired_input"].flatten(1)[:, None] == labels.images.flatten(1)).all(-1)


@pytest.mark.parametrize("count", [4, 10, 40, IMAGES])
def test_balanced_rows_are_even_over_classes_and_depend_on_seed(count):
    rows, again, other = (balanced_rows(LABELS, count, CLASSES, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(rows, again)
    assert torch.equal(rows, other) == (count == IMAGES)
    shares = torch.bincount(LABELS[rows], minlength=CLASSES)
    assert len(rows.unique()) == count == int(shares.sum())
    assert int(shares.max() - shares.min()) <= 1


@pytest.mark.parametrize(
    ("count", "message"), [(3, "take 4 to 400"), (401, "take 4 to 400"), (300, "class 3 has only 20 images")]
)
def test_unavailable_number_of_labels_raises(count, message):
    labels = LABELS.clone()
    if count == 300:
        labels[(labels == 3).nonzero()[20:, 0]] = 0
    with pytest.raises(UserError, match=message):
        balanced_rows(labels, count, CLASSES, seed=0)


@pytest.mark.parametrize("count", [40, None])
def test_table_hides_other_labels(count):
    labels = few(count).table.columns["label"]
    known = labels != UNLABELLED
    assert int(known.sum()) == (count or IMAGES)
    assert torch.equal(labels[known], LABELS[known])


@pytest.mark.parametrize("rate", [0.0, 0.2, 1.0])
def test_fixed_corruption_changes_exact_share_of_labels(rate):
    wrong = corrupted(LABELS, rate, CLASSES, seed=0)
    assert int((wrong != LABELS).sum()) == round(rate * IMAGES)
    assert wrong.min() >= 0
    assert wrong.max() < CLASSES
    if rate == 1.0:  # each of the three wrong classes about a third of the time
        assert torch.bincount((wrong - LABELS) % CLASSES, minlength=CLASSES)[1:].min() > 100


def test_fixed_corruption_is_equal_at_each_access():
    labels = few(rate=0.5, corruption="fixed")
    seen = batch_of(labels, labelled_accesses(labels, epochs=3))["label"].view(3, -1)
    assert (seen == labels.known).all()
    assert int((labels.known != LABELS[labels.rows]).sum()) == 20


def test_resampled_corruption_varies_with_mean_rate():
    labels = few(rate=0.3, corruption="resampled")
    batch = batch_of(labels, labelled_accesses(labels, epochs=200))
    seen, truth = batch["label"].view(200, -1), LABELS[labels.rows]
    assert (seen.mode(0).values == truth).all()
    assert abs((seen != truth).float().mean() - 0.3) < 0.02
    paired = paired_rows(labels, batch).float().argmax(-1)
    assert abs((batch["paired_label"] != truth[paired]).float().mean() - 0.3) < 0.02


def test_each_sample_is_paired_with_labelled_image_and_label():
    labels = few()
    batch = batch_of(labels, torch.arange(IMAGES))
    paired = paired_rows(labels, batch)
    assert paired.any(1).all()
    assert torch.equal(batch["paired_label"], labels.known[paired.float().argmax(1)])
    assert paired.any(0).sum() > 30, "nearly all labelled images are drawn"


def test_noise_is_standard_normal_and_new_at_each_access():
    noise = batch_of(few(noise_shape=(5,)), torch.arange(10_000))["noise"]
    assert noise.shape == (10_000, 5)
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert len(noise.unique(dim=0)) == 10_000
