"""The classifier of few labels: averaged weights, losses compared with explicit sums, and augmented views."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoencoder.labels import FewLabels
from autoencoder.vae import local_divergence
from digits.affine import AffineRange, warp
from digits.classifier import ConvolutionalClassifier, WeightAverage
from digits.consistency import ConsistencyRegularization
from digits.views import Views, blanked
from tests.recipes.pieces import assert_sum_over_samples
from toolkit.data.table import TensorTable


class LogitsOfPixels(nn.Module):
    """Model whose logits are the first three pixels times a weight of 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images, *, averaged=False, **views):
        assert averaged == (not views), "the averaged weights are for pseudo-labels only"
        inputs = {"logits": images} | {f"{name}_logits": view for name, view in views.items()}
        return {name: self.weight * view.flatten(1)[:, :3].float() for name, view in inputs.items()}


def images(*pixels):
    return torch.tensor(pixels, dtype=torch.uint8)[:, None]


def batch(count=10):
    draws = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (3, count, 8, 8), dtype=torch.uint8, generator=draws)
    return {
        "input": pictures[0],
        "strong": pictures[1],
        "label": torch.randint(-1, 3, (count,), generator=draws),
        "paired_input": pictures[2],
        "paired_label": torch.randint(0, 3, (count,), generator=draws),
        "direction": torch.randn(count, 64, generator=draws),
    }


def network():
    torch.manual_seed(0)
    return ConvolutionalClassifier(num_classes=3, shape=(8, 8), width=4, smoothness_radius=0.5)


FIXMATCH = {"pseudo_label_weight": 0.5, "confidence": 0.35}
VAT = {"smoothness_weight": 2.0, "entropy_weight": 0.5}


def test_fixmatch_learns_confident_weak_answers_from_strong_views():
    samples = {
        "input": images([0, 4, 0], [0, 1, 0]),  # answers of 96 % and 58 %
        "strong": images([2, 0, 0], [5, 0, 0]),
        "paired_input": images([0, 0, 1], [0, 0, 0]),
        "paired_label": torch.tensor([2, 0]),
        "label": torch.tensor([-1, -1]),
    }
    model = LogitsOfPixels()
    loss = ConsistencyRegularization(pseudo_label_weight=3.0, confidence=0.95).loss(model, samples)
    pseudo = math.log(math.exp(2) + 2)  # class 1 of the strong view (2, 0, 0)
    labelled = math.log(math.e + 2) - 1 + math.log(3)
    assert loss.sum.item() == pytest.approx(labelled + 3 * pseudo)
    assert loss.count == 2
    assert {name: value.item() for name, value in loss.sums.items()} == pytest.approx(
        {"cross_entropy": labelled, "pseudo_cross_entropy": pseudo, "confident": 1}
    )
    # Only the strong view w * (2, 0, 0) and the labelled image w * (0, 0, 1) have gradients.
    loss.sum.backward()
    strong = 2 * math.exp(2) / (math.exp(2) + 2)
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


@pytest.mark.parametrize("settings", [FIXMATCH, VAT, FIXMATCH | VAT], ids=["fixmatch", "vat", "both"])
def test_loss_is_sum_over_samples_and_ignores_hidden_labels(settings):
    task, model, samples = ConsistencyRegularization(**settings), network(), batch()
    loss, other = task.loss(model, samples), task.loss(model, samples | {"label": 2 - samples["label"]})
    assert torch.equal(loss.sum, other.sum)
    assert_sum_over_samples(task, model, samples, [4, 0, 6])


def test_evaluation_uses_running_mean_of_weights():
    torch.manual_seed(0)
    model = ConvolutionalClassifier(num_classes=3, shape=(8, 8), width=2)
    images = torch.randint(0, 256, (4, 8, 8), dtype=torch.uint8)
    bias, mean = model.layers[-1].bias, model.average[-1].bias
    expected = bias.detach().clone()
    assert torch.equal(mean, expected)
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (30, 0.5)):
        with torch.no_grad():
            bias.add_(step)
        WeightAverage(0.5).on_step_end(SimpleNamespace(raw_model=model, state=SimpleNamespace(step=step)))
        expected = decay * expected + (1 - decay) * bias.detach()
        assert torch.allclose(mean, expected)
    assert {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"layers"}
    ahead = (bias - mean).mean().item()
    by_weights, by_mean = model(images)["logits"], model(images, averaged=True)["logits"]
    assert (by_weights - by_mean).mean().item() == pytest.approx(ahead, rel=1e-3)
    assert torch.equal(model.eval()(images)["logits"], by_mean)


COUNT = 60
TABLE = TensorTable(
    input=torch.randint(0, 256, (COUNT, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
    label=torch.arange(COUNT) % 4,
)
WEAK, STRONG = AffineRange(degrees=0.0, scale=0.0, shear=0.0, shift=1.0), AffineRange()


def views_of(accesses, *, seed=3, strong=STRONG):
    few = FewLabels(TABLE, 8, num_classes=4, seed=seed)
    views = Views(few, weak=WEAK, strong=strong, labelled=STRONG, blank=4, seed=seed)
    return views(few.table[accesses % COUNT], accesses)


def test_views_are_function_of_seed_and_access():
    accesses = torch.randperm(5 * COUNT, generator=torch.Generator().manual_seed(1))[:40]
    batch, again = views_of(accesses), views_of(accesses)
    parts = [views_of(part) for part in accesses.split([7, 0, 33])]
    for name, column in batch.items():
        assert torch.equal(column, again[name])
        difference = (column.int() - torch.cat([part[name] for part in parts]).int()).abs().max()
        assert difference <= 1, f"{name}: pixels are rounded"
    assert not torch.equal(views_of(accesses, seed=4)["strong"], batch["strong"])
    for name in ("input", "strong"):
        unchanged = (batch[name] == TABLE[accesses % COUNT]["input"]).flatten(1).all(1)
        assert unchanged.float().mean() < 0.2
    assert "strong" not in views_of(accesses, strong=None)
    first, second = (views_of(torch.arange(COUNT) + epoch * COUNT) for epoch in (0, 1))
    assert (first["strong"] != second["strong"]).flatten(1).any(1).all()


def test_blanked_square_has_size_and_centre():
    images = torch.full((3, 12, 12), 9, dtype=torch.uint8)
    centres = torch.tensor([[0.0, 0.0], [-1.0, -1.0], [0.5, -0.5]])  # middle, corner, (9, 3)
    black = blanked(images, centres, 4) == 0
    assert black.sum((1, 2)).tolist() == [16, 4, 16]
    assert black[0, 4:8, 4:8].all()
    assert black[1, :2, :2].all()
    assert black[2, 7:11, 1:5].all()


IMAGES = torch.randint(0, 256, (12, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
QUARTER = AffineRange(degrees=90.0, scale=0.5, shear=0.5, shift=4.0)


def draws(**values):
    names = ("angle", "scale", "shear", "x", "y")
    return torch.tensor([values.get(name, 0.0) for name in names]).expand(len(IMAGES), -1)


def test_each_draw_changes_image_as_named():
    """Shifts by pixels and rotations by right angles need no interpolation."""
    inside = torch.zeros_like(IMAGES)
    inside[:, 6:22, 6:22] = IMAGES[:, 6:22, 6:22]
    assert torch.equal(warp(inside, draws(), QUARTER), inside)
    assert torch.equal(warp(inside, draws(angle=1.0), QUARTER), inside.rot90(1, (1, 2)))
    assert torch.equal(warp(inside, draws(x=1.0), QUARTER), inside.roll(-4, 2))
    assert torch.equal(warp(inside, draws(y=-0.5), QUARTER), inside.roll(2, 1))
    black = int((inside == 0).sum())
    assert int((warp(inside, draws(scale=1.0), QUARTER) == 0).sum()) > black, "smaller"
    assert int((warp(inside, draws(scale=-1.0), QUARTER) == 0).sum()) < black, "larger"
    slanted = warp(inside, draws(shear=1.0), QUARTER)
    rows = (slanted > 0).float().argmax(2)
    assert (rows[:, 8] - rows[:, 19] >= 4).all(), "upper rows are further right than lower rows"
