"""Virtual adversarial directions, compared with the dense Hessian."""

import torch
from torch import nn
from torch.nn import functional as F

from autoencoder.vae import local_divergence
from benchmarks.support.precision import in_float64

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
