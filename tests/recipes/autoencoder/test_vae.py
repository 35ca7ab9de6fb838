"""Bounds of the VAE compared with torch distributions, adversarial directions compared with the dense Hessian."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from autoencoder.vae import SemiSupervisedVAE, local_divergence, to_unit
from benchmarks.support.precision import in_float64


def small(style_dim=1):
    torch.manual_seed(0)
    sizes = {"num_pixels": 6, "num_classes": 3, "hidden": 8, "classifier_hidden": 8}
    return SemiSupervisedVAE(style_dim=style_dim, smoothness_radius=0.5, **sizes).double()


IMAGES = torch.randint(0, 256, (5, 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


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


def test_model_without_style_has_classifier_only():
    model = small(style_dim=None)
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"classifier"}
    assert set(model.float()(IMAGES, styles=True)) == {"logits"}


def test_empty_batch_has_empty_outputs():
    empty = IMAGES[:0]
    out = small().float()(empty, torch.zeros(0, 1), paired=empty, directions=torch.zeros(0, 6), styles=True)
    sum(value.sum() for value in out.values()).backward()
    assert {name: len(value) for name, value in out.items()} == dict.fromkeys(out, 0)


RADIUS = 0.5


def divergence(network, x, r):
    """Return KL(q(y | x) || q(y | x + r)) of one image."""
    p, q = network(x).softmax(-1).detach(), network(x + r).softmax(-1)
    return (p * (p / q).log()).sum()


def worst_divergence(network, x, directions):
    with in_float64():
        return local_divergence(network, x, network(x).detach(), directions, radius=RADIUS)


def test_direction_is_hessian_times_draw():
    torch.manual_seed(0)
    # With small weights the divergence is a quadratic form up to the length of a draw.
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        network[0].weight.mul_(1e-3)
    x, directions = torch.rand(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    found = worst_divergence(network, x, directions)
    assert all(parameter.grad is None for parameter in network.parameters())
    for image, draw, one in zip(x, directions, found, strict=True):
        zero = torch.zeros(6, dtype=torch.float64)
        hessian = torch.autograd.functional.hessian(lambda r, image=image: divergence(network, image, r), zero)
        worst = RADIUS * F.normalize(hessian @ draw, dim=0)
        assert torch.allclose(one, divergence(network, image, worst), rtol=1e-2)
        assert one > divergence(network, image, RADIUS * F.normalize(draw, dim=0))


def test_direction_of_linear_classifier_is_difference_of_weights():
    torch.manual_seed(0)
    network = nn.Linear(6, 2).double()
    x, directions = torch.rand(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    found = worst_divergence(network, x, directions)
    across = RADIUS * F.normalize((network.weight[1] - network.weight[0]).detach(), dim=0)
    either = torch.stack([torch.stack([divergence(network, image, s * across) for s in (-1, 1)]) for image in x])
    assert (found[:, None] - either).abs().min(1).values.max() < 1e-12
