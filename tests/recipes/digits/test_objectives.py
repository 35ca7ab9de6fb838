"""FixMatch and virtual adversarial training, against sums by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoencoder.vae import local_divergence
from digits.classifier import ConvolutionalClassifier
from digits.consistency import ConsistencyRegularization


class LogitsOfPixels(nn.Module):
    """The first three pixels of an image are logits, times a weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(
        self, images: torch.Tensor, *, averaged: bool = False, **views: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        assert averaged == (not views), "the averaged weights give pseudo-labels, and learn nothing"
        asked = {"logits": images} | {f"{name}_logits": view for name, view in views.items()}
        return {name: self.weight * view.flatten(1)[:, :3].float() for name, view in asked.items()}


def image(*pixels: int) -> torch.Tensor:
    return torch.tensor([[pixels]], dtype=torch.uint8)


def batch(count: int = 10) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, count, 8, 8), dtype=torch.uint8, generator=draws)
    return {
        "input": images[0],
        "strong": images[1],
        "label": torch.randint(-1, 3, (count,), generator=draws),
        "paired_input": images[2],
        "paired_label": torch.randint(0, 3, (count,), generator=draws),
        "direction": torch.randn(count, 64, generator=draws),
    }


def network() -> ConvolutionalClassifier:
    torch.manual_seed(0)
    return ConvolutionalClassifier(num_classes=3, shape=(8, 8), width=4, smoothness_radius=0.5)


FIXMATCH = {"pseudo_label_weight": 0.5, "confidence": 0.35}
VAT = {"smoothness_weight": 2.0, "entropy_weight": 0.5}
TASKS = [
    pytest.param(ConsistencyRegularization(**settings), id=name)
    for name, settings in {"fixmatch": FIXMATCH, "vat": VAT, "both": FIXMATCH | VAT}.items()
]


def test_fixmatch_learns_the_confident_answers_of_weak_views_by_their_strong_views():
    sure, unsure = image(0, 4, 0), image(0, 1, 0)  # 96 % and 58 %
    samples = {
        "input": torch.cat([sure, unsure]),
        "strong": torch.cat([image(2, 0, 0), image(5, 0, 0)]),
        "paired_input": torch.cat([image(0, 0, 1), image(0, 0, 0)]),
        "paired_label": torch.tensor([2, 0]),
        "label": torch.tensor([-1, -1]),
    }
    model = LogitsOfPixels()
    loss = ConsistencyRegularization(pseudo_label_weight=3.0, confidence=0.95).loss(model, samples)
    own = math.log(math.exp(2) + 2)  # class 1 of the strong view (2, 0, 0)
    labelled = math.log(math.e + 2) - 1 + math.log(3)
    assert loss.sum.item() == pytest.approx(labelled + 3 * own)
    assert loss.count == 2
    assert {name: value.item() for name, value in loss.sums.items()} == pytest.approx(
        {"cross_entropy": labelled, "pseudo_cross_entropy": own, "confident": 1}
    )
    # Only the strong view and the labelled images have a gradient: with logits w * (2, 0, 0) and w * (0, 0, 1).
    loss.sum.backward()
    strong = 2 * math.exp(2) / (math.exp(2) + 2)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(math.e / (math.e + 2) - 1 + 3 * strong)


def test_vat_adds_divergence_and_entropy():
    model, samples = network(), batch()
    loss = ConsistencyRegularization(**VAT).loss(model, samples)
    x = samples["input"].flatten(1) / 255
    logits = model(samples["input"])["logits"]
    divergence = local_divergence(model.layers, x, logits.detach(), samples["direction"], radius=0.5).sum()
    entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
    labelled = F.cross_entropy(model(samples["paired_input"])["logits"], samples["paired_label"], reduction="sum")
    assert loss.sum.item() == pytest.approx((labelled + 2 * divergence + 0.5 * entropy).item(), rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_a_sum_over_samples_and_sees_no_hidden_label(task):
    model, whole = network(), batch()
    parts = [{name: column[rows] for name, column in whole.items()} for rows in (slice(4), slice(4, 4), slice(4, 10))]
    together, pieces = task.loss(model, whole), [task.loss(model, part) for part in parts]
    assert torch.allclose(together.sum, sum(piece.sum for piece in pieces), rtol=1e-5)
    assert together.count == sum(piece.count for piece in pieces) == task.count(whole) == 10
    assert torch.equal(task.loss(model, whole | {"label": 2 - whole["label"]}).sum, together.sum)
    pieces[1].sum.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
