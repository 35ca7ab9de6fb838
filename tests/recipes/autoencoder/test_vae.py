"""Bounds of the VAE, compared with quadrature, and its smoothness term."""

import math

import torch
from torch.nn import functional as F

from autoencoder.vae import SemiSupervisedVAE, local_divergence, to_unit


def small(style_dim=1):
    torch.manual_seed(0)
    sizes = {"num_pixels": 6, "num_classes": 3, "hidden": 8, "classifier_hidden": 8}
    return SemiSupervisedVAE(style_dim=style_dim, smoothness_radius=0.5, **sizes).double()


IMAGES = torch.randint(0, 256, (5, 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def log_joint(autoencoder, x):
    """Return log p(x, y) for all classes, shape (B, C), by quadrature over the style dimension."""
    grid = torch.linspace(-8, 8, 2001, dtype=torch.float64)
    logits = autoencoder.to_pixels(autoencoder.decode(grid[:, None, None].expand(-1, 3, 1)))  # (G, C, P)
    shape = (len(x), *logits.shape)
    pixels = x[:, None, None].expand(shape)
    likelihood = -F.binary_cross_entropy_with_logits(logits.expand(shape), pixels, reduction="none").sum(-1)
    prior = -0.5 * grid.square() - 0.5 * math.log(2 * math.pi)
    width = math.log(16 / 2000)
    return (likelihood + prior[:, None]).logsumexp(1) + width - math.log(3)


def test_mean_bound_is_below_log_probability():
    model = small()
    x = to_unit(IMAGES).double()
    noise = torch.randn(4000 * len(x), 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bounds = model.autoencoder(x.repeat(4000, 1), noise).view(4000, len(x), 3).mean(0)
    truth = log_joint(model.autoencoder, x)
    assert (bounds < truth + 0.01).all()
    assert (truth - bounds < 2.0).all(), "an untrained posterior is near the prior"


def test_bound_is_tight_for_exact_posterior():
    autoencoder = small().autoencoder
    with torch.no_grad():  # if the decoder ignores the style, the posterior is the prior
        autoencoder.from_style.weight.zero_()
        autoencoder.posterior.weight.zero_()
        autoencoder.posterior.bias.zero_()
    x = to_unit(IMAGES).double()
    bounds = autoencoder(x, torch.randn(len(x), 1, dtype=torch.float64))
    assert torch.allclose(bounds, log_joint(autoencoder, x), atol=1e-5)


def test_bound_of_each_class_equals_torch_distributions():
    autoencoder = small(style_dim=2).autoencoder
    x, noise = to_unit(IMAGES).double(), torch.randn(5, 2, dtype=torch.float64)
    bounds = autoencoder(x, noise)
    mean, log_std = autoencoder.encode(x)
    for label in range(3):
        z = (mean + log_std.exp() * noise[:, None])[:, label]
        hidden = (autoencoder.from_style(z) + autoencoder.from_class[label]).relu()
        logits = autoencoder.to_pixels(autoencoder.to_hidden(hidden).relu())
        likelihood = -F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(-1)
        q = torch.distributions.Normal(mean[:, label], log_std[:, label].exp())
        kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(-1)
        assert torch.allclose(bounds[:, label], likelihood - kl - math.log(3))


def test_adversarial_direction_diverges_more_than_random_direction():
    model = small(style_dim=None)
    x = torch.rand(64, 6, dtype=torch.float64)
    logits = model.classifier(x).detach()
    directions = torch.randn(64, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = local_divergence(model.classifier, x, logits, directions, radius=0.5).mean()
    shifted = model.classifier(x + 0.5 * F.normalize(directions, dim=1)).log_softmax(-1)
    random = F.kl_div(shifted, logits.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
    assert found > 1.5 * random
    assert all(parameter.grad is None for parameter in model.parameters())


def test_model_without_style_has_classifier_only():
    model = small(style_dim=None)
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"classifier"}
    assert set(model.float()(IMAGES, styles=True)) == {"logits"}


def test_empty_batch_has_empty_outputs():
    empty = IMAGES[:0]
    out = small().float()(empty, torch.zeros(0, 1), paired=empty, directions=torch.zeros(0, 6), styles=True)
    sum(value.sum() for value in out.values()).backward()
    assert {name: len(value) for name, value in out.items()} == dict.fromkeys(out, 0)
