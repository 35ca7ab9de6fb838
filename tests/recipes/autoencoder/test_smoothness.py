"""Virtual adversarial directions, against the dense Hessian."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from autoencoder.vae import local_divergence
from tests.support.equality import in_float64

RADIUS = 0.5


def divergence(network: nn.Module, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """KL(q(y | x) || q(y | x + r)) of one image, as it is written in a book."""
    p, q = network(x).softmax(-1).detach(), network(x + r).softmax(-1)
    return (p * (p / q).log()).sum()


def test_the_direction_is_the_hessian_times_the_draw():
    torch.manual_seed(0)
    # Small weights: the divergence is a quadratic form out to the length of a draw.
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        network[0].weight.mul_(1e-3)
    x, directions = torch.rand(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    with in_float64():
        found = local_divergence(network, x, network(x).detach(), directions, radius=RADIUS)
    for image, draw, one in zip(x, directions, found, strict=True):
        zero = torch.zeros(6, dtype=torch.float64)
        hessian = torch.autograd.functional.hessian(lambda r, image=image: divergence(network, image, r), zero)
        worst = RADIUS * F.normalize(hessian @ draw, dim=0)
        assert torch.allclose(one, divergence(network, image, worst), rtol=1e-2)
        assert one > divergence(network, image, RADIUS * F.normalize(draw, dim=0))


def test_two_classes_have_one_direction():
    """Of a linear classifier, the difference of its weights: the divergence can be written down."""
    torch.manual_seed(0)
    network = nn.Linear(6, 2).double()
    x = torch.rand(5, 6, dtype=torch.float64)
    directions = torch.randn(5, 6, dtype=torch.float64)
    with in_float64():
        found = local_divergence(network, x, network(x).detach(), directions, radius=RADIUS)
    across = RADIUS * F.normalize((network.weight[1] - network.weight[0]).detach(), dim=0)
    either = torch.stack([torch.stack([divergence(network, image, s * across) for s in (-1, 1)]) for image in x])
    assert (found[:, None] - either).abs().min(1).values.max() < 1e-12
