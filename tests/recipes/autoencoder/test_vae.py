"""The bounds are bounds, by quadrature; smoothness finds directions that matter."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from autoencoder.vae import SemiSupervisedVAE, StyleAutoencoder, local_divergence, to_unit


def small(style_dim: int | None = 1) -> SemiSupervisedVAE:
    torch.manual_seed(0)
    model = SemiSupervisedVAE(
        num_pixels=6, num_classes=3, style_dim=style_dim, hidden=8, classifier_hidden=8, smoothness_radius=0.5
    )
    return model.double()


def images(count: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, (count, 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def log_joint(autoencoder: StyleAutoencoder, x: torch.Tensor) -> torch.Tensor:
    """log p(x, y) for all classes (B, C), by quadrature over the one style dimension."""
    grid = torch.linspace(-8, 8, 2001, dtype=torch.float64)
    logits = autoencoder.to_pixels(autoencoder.decode(grid[:, None, None].expand(-1, 3, 1)))  # (G, C, P)
    likelihood = -F.binary_cross_entropy_with_logits(
        logits.expand(len(x), *logits.shape), x[:, None, None].expand(len(x), *logits.shape), reduction="none"
    ).sum(-1)
    prior = -0.5 * grid.square() - 0.5 * math.log(2 * math.pi)
    width = math.log(16 / 2000)
    return (likelihood + prior[:, None]).logsumexp(1) + width - math.log(3)


def test_the_mean_bound_of_a_pair_stays_below_its_log_probability():
    model = small()
    x = to_unit(images()).double()
    noise = torch.randn(4000 * len(x), 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bounds = model.autoencoder(x.repeat(4000, 1), noise).view(4000, len(x), 3).mean(0)
    truth = log_joint(model.autoencoder, x)
    assert (bounds < truth + 0.01).all()
    assert (truth - bounds < 2.0).all(), "and not by nonsense: an untrained posterior is near the prior"


def test_the_bound_is_tight_where_the_posterior_is_exact():
    model = small()
    autoencoder = model.autoencoder
    with torch.no_grad():  # a decoder that ignores the style has the prior for its posterior
        autoencoder.from_style.weight.zero_()
        autoencoder.posterior.weight.zero_()
        autoencoder.posterior.bias.zero_()
    x = to_unit(images()).double()
    bounds = autoencoder(x, torch.randn(len(x), 1, dtype=torch.float64))
    assert torch.allclose(bounds, log_joint(autoencoder, x), atol=1e-5)


def test_every_class_has_its_own_bound():
    model = small(style_dim=2)
    x, noise = to_unit(images()).double(), torch.randn(5, 2, dtype=torch.float64)
    bounds = model.autoencoder(x, noise)
    mean, log_std = model.autoencoder.encode(x)
    for label in range(3):
        z = (mean + log_std.exp() * noise[:, None])[:, label]
        hidden = (model.autoencoder.from_style(z) + model.autoencoder.from_class[label]).relu()
        logits = model.autoencoder.to_pixels(model.autoencoder.to_hidden(hidden).relu())
        likelihood = -F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(-1)
        q = torch.distributions.Normal(mean[:, label], log_std[:, label].exp())
        kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(-1)
        assert torch.allclose(bounds[:, label], likelihood - kl - math.log(3))


def test_smoothness_looks_where_the_classifier_changes_most():
    model = small(style_dim=None)
    x = torch.rand(64, 6, dtype=torch.float64)
    logits = model.classifier(x).detach()
    directions = torch.randn(64, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = local_divergence(model.classifier, x, logits, directions, radius=0.5).mean()
    shifted = model.classifier(x + 0.5 * F.normalize(directions, dim=1)).log_softmax(-1)
    at_random = F.kl_div(shifted, logits.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
    assert found > 1.5 * at_random


def test_smoothness_leaves_no_gradient_but_its_own():
    model = small(style_dim=None)
    x = torch.rand(8, 6, dtype=torch.float64)
    directions = torch.randn(8, 6, dtype=torch.float64)
    local_divergence(model.classifier, x, model.classifier(x).detach(), directions, radius=0.5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_control_has_no_generative_part():
    model = small(style_dim=None)
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"classifier"}
    assert set(model.float()(images(), styles=True)) == {"logits"}


def test_an_empty_batch_is_a_batch():
    model = small().float()
    out = model(images()[:0], torch.zeros(0, 1), paired=images()[:0], directions=torch.zeros(0, 6), styles=True)
    sum(value.sum() for value in out.values()).backward()
    assert {name: len(value) for name, value in out.items()} == dict.fromkeys(out, 0)
