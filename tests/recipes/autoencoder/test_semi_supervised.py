"""The objective of few labels."""

from __future__ import annotations

import pytest
import torch

from autoencoder.semi_supervised import LabelledOnly, SemiSupervised, evidence_bound
from autoencoder.vae import SemiSupervisedVAE


def batch(count: int = 12) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {
        "input": torch.randint(0, 256, (count, 2, 3), dtype=torch.uint8, generator=draws),
        "label": torch.randint(-1, 3, (count,), generator=draws),
        "paired_input": torch.randint(0, 256, (count, 2, 3), dtype=torch.uint8, generator=draws),
        "paired_label": torch.randint(0, 3, (count,), generator=draws),
        "noise": torch.randn(count, 2, generator=draws),
        "direction": torch.randn(count, 6, generator=draws),
    }


def model(style_dim: int | None = 2) -> SemiSupervisedVAE:
    torch.manual_seed(0)
    return SemiSupervisedVAE(num_pixels=6, num_classes=3, style_dim=style_dim, hidden=8, classifier_hidden=8)


TASKS = [
    pytest.param(SemiSupervised(2.0, smoothness_weight=3.0), 2, id="exact"),
    pytest.param(SemiSupervised(2.0, smoothness_weight=0.0), 2, id="without smoothness"),
    pytest.param(LabelledOnly(), None, id="supervised"),
    pytest.param(LabelledOnly(pseudo_label_weight=0.5), None, id="pseudo-labels"),
]


def test_an_image_without_label_is_bounded_by_the_sum_over_classes():
    draws = torch.Generator().manual_seed(0)
    bounds, logits = torch.randn(6, 3, generator=draws), torch.randn(6, 3, generator=draws)
    unknown = torch.full((6,), -1)
    total = bounds.logsumexp(1)
    assert (evidence_bound(logits, bounds, unknown) < total).all()
    # Equal where q(y | x) is the posterior, which is the softmax of log p(x, y).
    assert torch.allclose(evidence_bound(bounds, bounds, unknown), total)


def test_an_image_with_a_label_has_the_bound_of_that_class():
    bounds = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert evidence_bound(torch.zeros(2, 3), bounds, torch.tensor([2, 0])).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("task", "style_dim"), TASKS)
def test_the_loss_does_not_depend_on_how_the_batch_is_split(task, style_dim):
    network, whole = model(style_dim), batch()
    parts = [{name: column[rows] for name, column in whole.items()} for rows in (slice(5), slice(5, 5), slice(5, 12))]
    together, pieces = task.loss(network, whole), [task.loss(network, part) for part in parts]
    assert torch.allclose(together.sum, sum(piece.sum for piece in pieces), rtol=1e-5)
    assert together.count == sum(piece.count for piece in pieces) == task.count(whole) == 12


@pytest.mark.parametrize(("task", "style_dim"), TASKS)
def test_every_parameter_has_a_gradient_even_of_an_empty_batch(task, style_dim):
    network = model(style_dim)
    empty = {name: column[:0] for name, column in batch().items()}
    task.loss(network, empty).sum.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_labels_of_held_out_images_judge_the_accuracy_and_nothing_else():
    task, network, images = SemiSupervised(2.0, smoothness_weight=3.0), model(), batch()
    images["label"] = images["label"].clamp_min(0)
    other = images | {"label": (images["label"] + 1) % 3}
    first, second = task.evaluate(network, images), task.evaluate(network, other)
    assert first.sum == second.sum
    assert first.sums["accuracy"] != second.sums["accuracy"]


def test_a_supervised_control_never_sees_an_unlabelled_image():
    network, images = model(None), batch()
    other = images | {"input": 255 - images["input"]}
    assert torch.equal(LabelledOnly().loss(network, images).sum, LabelledOnly().loss(network, other).sum)


def test_only_confident_answers_become_labels():
    network, images = model(None), batch()
    with torch.no_grad():
        network.classifier[-1].weight.zero_()
        network.classifier[-1].bias.copy_(torch.tensor([1.0, 0.0, 0.0]))  # 58 %: not enough
    plain = LabelledOnly().loss(network, images).sum
    assert torch.equal(LabelledOnly(pseudo_label_weight=1.0).loss(network, images).sum, plain)
    with torch.no_grad():
        network.classifier[-1].bias.copy_(torch.tensor([9.0, 0.0, 0.0]))
    plain = LabelledOnly().loss(network, images).sum
    assert LabelledOnly(pseudo_label_weight=1.0).loss(network, images).sum > plain
