"""Labels by the batch, as in the reference, compared with its published runs."""

from types import SimpleNamespace

import pytest
import torch

from autoencoder.batch_mask import reference_mask

PUBLISHED = {
    100: [1, 0, 0, 0, 3, 1, 1, 0, 1, 0],
    600: [2, 2, 5, 0, 3, 2, 2, 1, 4, 4],
    1000: [3, 3, 9, 1, 5, 2, 4, 3, 5, 7],
    3000: [10, 12, 17, 12, 13, 15, 10, 14, 16, 13],
}
"""Labelled batches of seeds 42 to 51, of 234 batches of 256 images, by labels."""


@pytest.mark.parametrize("labels", PUBLISHED)
def test_reference_mask_has_published_number_of_labelled_batches(labels):
    counts = [len(reference_mask(60_000, labels, 256, seed=seed)[1].places) for seed in range(42, 52)]
    assert counts == PUBLISHED[labels]


def test_epochs_have_full_batches_in_different_orders():
    order, _ = reference_mask(100, 50, 30, seed=0)
    assert order.steps_per_epoch == 3
    batches = order.batches(0)
    first, second = ([next(batches) for _ in range(3)] for _ in range(2))
    assert [len(batch) for batch in first] == [30, 30, 30]
    assert len(torch.cat(first).unique()) == 90
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert order.samples_before(4) == 120
    assert torch.equal(next(order.batches(4)), second[1])


def test_mask_hides_labels_of_unlabelled_batches():
    order, mask = reference_mask(100, 50, 10, seed=1)
    assert 0 < len(mask.places) < 10
    for step in range(20):
        batch = {"label": torch.arange(10)}
        trainer = SimpleNamespace(state=SimpleNamespace(step=step), batches=order)
        mask.on_step_start(trainer, [batch])
        assert (batch["label"][0] == 0) == (step % 10 in mask.places)
