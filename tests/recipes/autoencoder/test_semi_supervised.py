"""Losses of semi-supervised training."""

import pytest
import torch

from autoencoder.semi_supervised import LabelledOnly, SemiSupervised, evidence_bound
from autoencoder.vae import SemiSupervisedVAE
from tests.recipes.pieces import assert_sum_over_samples


def batch(count=12):
    draws = torch.Generator().manual_seed(0)
    return {
        "input": torch.randint(0, 256, (count, 2, 3), dtype=torch.uint8, generator=draws),
        "label": torch.randint(-1, 3, (count,), generator=draws),
        "paired_input": torch.randint(0, 256, (count, 2, 3), dtype=torch.uint8, generator=draws),
        "paired_label": torch.randint(0, 3, (count,), generator=draws),
        "noise": torch.randn(count, 2, generator=draws),
        "direction": torch.randn(count, 6, generator=draws),
    }


def model(style_dim=2):
    torch.manual_seed(0)
    return SemiSupervisedVAE(num_pixels=6, num_classes=3, style_dim=style_dim, hidden=8, classifier_hidden=8)


def test_evidence_bound_without_label_is_below_sum_over_classes():
    draws = torch.Generator().manual_seed(0)
    bounds, logits = torch.randn(6, 3, generator=draws), torch.randn(6, 3, generator=draws)
    unknown = torch.full((6,), -1)
    total = bounds.logsumexp(1)
    assert (evidence_bound(logits, bounds, unknown) < total).all()
    # Equal if q(y | x) is the posterior, the softmax of log p(x, y).
    assert torch.allclose(evidence_bound(bounds, bounds, unknown), total)


def test_evidence_bound_with_label_is_bound_of_its_class():
    bounds = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert evidence_bound(torch.zeros(2, 3), bounds, torch.tensor([2, 0])).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("task", "style_dim"),
    [
        pytest.param(SemiSupervised(2.0, smoothness_weight=3.0), 2, id="exact"),
        pytest.param(SemiSupervised(2.0, smoothness_weight=0.0), 2, id="without smoothness"),
        pytest.param(LabelledOnly(), None, id="supervised"),
        pytest.param(LabelledOnly(pseudo_label_weight=0.5), None, id="pseudo-labels"),
    ],
)
def test_loss_is_sum_over_samples(task, style_dim):
    assert_sum_over_samples(task, model(style_dim), batch(), [5, 0, 7])


def test_evaluation_labels_change_accuracy_only():
    task, network, images = SemiSupervised(2.0, smoothness_weight=3.0), model(), batch()
    images["label"] = images["label"].clamp_min(0)
    other = images | {"label": (images["label"] + 1) % 3}
    first, second = task.evaluate(network, images), task.evaluate(network, other)
    assert first.sum == second.sum
    assert first.sums["accuracy"] != second.sums["accuracy"]


def test_labelled_only_loss_ignores_unlabelled_images():
    network, images = model(None), batch()
    other = images | {"input": 255 - images["input"]}
    assert torch.equal(LabelledOnly().loss(network, images).sum, LabelledOnly().loss(network, other).sum)


@pytest.mark.parametrize(("logit", "confident"), [(1.0, False), (9.0, True)])
def test_only_confident_answers_become_pseudo_labels(logit, confident):
    network, images = model(None), batch()
    with torch.no_grad():
        network.classifier[-1].weight.zero_()
        network.classifier[-1].bias.copy_(torch.tensor([logit, 0.0, 0.0]))  # probability 58 % or 99.98 %
    plain, pseudo = LabelledOnly().loss(network, images), LabelledOnly(pseudo_label_weight=1.0).loss(network, images)
    assert (pseudo.sum > plain.sum) == confident
    assert (pseudo.sum == plain.sum) != confident
