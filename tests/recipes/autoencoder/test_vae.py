"""Bounds of both VAEs and adversarial directions against dense formulas, and leakage of classes into the style."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoencoder.leakage import measure_leakage, mutual_information, variance_ratio
from autoencoder.relaxed_vae import RelaxedBound, RelaxedVAE
from autoencoder.vae import SemiSupervisedVAE, local_divergence, to_unit
from benchmarks.support.precision import in_float64
from tests.recipes.pieces import assert_sum_over_samples


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


def model():
    torch.manual_seed(0)
    return RelaxedVAE(num_pixels=6, num_classes=3, style_dim=2, hidden=8)


def batch(count=6):
    draws = torch.Generator().manual_seed(0)
    return {
        "input": torch.randint(0, 256, (count, 2, 3), dtype=torch.uint8, generator=draws),
        "label": torch.arange(count) % 4 - 1,
        "noise": torch.randn(count, 8, 5, generator=draws),
    }


def test_model_has_parameter_count_of_reference():
    assert sum(parameter.numel() for parameter in RelaxedVAE().parameters()) == 415_734


def test_relaxed_samples_follow_class_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    normal = torch.randn(1, 40_000, 3, generator=torch.Generator().manual_seed(0))
    y = model().relaxed(logits, normal)[0]
    assert torch.allclose(y.sum(-1), torch.ones(40_000), atol=1e-5)
    shares = torch.bincount(y.argmax(-1), minlength=3) / 40_000
    # At any temperature, the greatest entry is class k with the probability of k.
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.01)


def test_log_weight_equals_torch_distributions():
    network, samples = model(), batch()
    noise, x = samples["noise"], samples["input"].flatten(1) / 255
    hidden = network.stem(x).relu()
    y = network.relaxed(network.to_logits(hidden), noise[..., :3])
    mean, log_std = network.to_style(torch.cat([y, hidden[:, None].expand(-1, 8, -1)], -1)).chunk(2, -1)
    q = torch.distributions.Normal(mean, log_std.exp())
    z = mean + log_std.exp() * noise[..., 3:]
    logits = network.decoder(torch.cat([y, z], -1))
    likelihood = torch.distributions.Bernoulli(logits=logits, validate_args=False).log_prob(x[:, None]).sum(-1)
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    expected = likelihood + prior - q.log_prob(z).sum(-1)
    assert torch.allclose(network(samples["input"], noise)["log_weight"], expected, atol=1e-3)


def test_known_label_adds_cross_entropy():
    network, samples = model(), batch()
    weights = [RelaxedBound(weight).loss(network, samples) for weight in (0.0, 3.0)]
    logits = network(samples["input"], samples["noise"], label=samples["label"])["logits"]
    known = samples["label"] != -1
    penalty = F.cross_entropy(logits[known], samples["label"][known], reduction="sum")
    assert torch.allclose(weights[1].sum - weights[0].sum, 3 * penalty, rtol=1e-4)
    assert weights[1].sum.isfinite()


def test_unknown_label_adds_no_term():
    network, samples = model(), batch()
    unknown = samples | {"label": torch.full_like(samples["label"], -1)}
    plain = -network(samples["input"], samples["noise"])["log_weight"].mean(-1).sum()
    assert torch.allclose(RelaxedBound(50.0).loss(network, unknown).sum, plain)


def test_loss_is_sum_over_samples():
    assert_sum_over_samples(RelaxedBound(1.0), model(), batch(), [4, 0, 2])


LABELS = np.arange(2000) % 4


def test_mutual_information_equals_closed_form():
    # Two bits, of which b copies a in three of four cases: I = H(b) - H(b | a) = ln 2 - H(1/4).
    a, b = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1, 1, 0])
    flip = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert mutual_information(a, b) == pytest.approx(math.log(2) - flip)
    assert mutual_information(a, a) == pytest.approx(math.log(2))


def test_independent_style_has_no_leakage():
    styles = np.random.default_rng(0).normal(size=(2000, 3))
    leakage = measure_leakage(styles, LABELS, LABELS)
    assert leakage["mig"] > 0.95
    limits = {"style_information": 0.05, "one_style_probe": 0.08, "all_styles_probe": 0.08, "style_variance": 0.02}
    for name, limit in limits.items():
        assert leakage[name] < limit, name


def test_style_equal_to_class_has_full_leakage():
    styles = np.random.default_rng(0).normal(size=(2000, 3))
    styles[:, 1] = LABELS + 0.01 * styles[:, 1]
    leakage = measure_leakage(styles, LABELS, LABELS)
    assert leakage["mig"] == pytest.approx(0, abs=1e-6), "inferred class and style have equal information"
    assert leakage["style_information"] == pytest.approx(1, abs=1e-6)
    assert leakage["all_styles_probe"] > 0.95
    assert leakage["style_variance"] > 100


def test_mig_is_gap_between_best_two_latent_variables():
    rng = np.random.default_rng(0)
    half = np.stack([LABELS % 2 + 0.01 * rng.normal(size=2000), rng.normal(size=2000)], 1)
    # The class has two bits; the inferred class has both, the first style has one.
    assert measure_leakage(half, LABELS, LABELS)["mig"] == pytest.approx(0.5, abs=0.01)


def test_variance_ratio_equals_closed_form():
    # Means -1 and 1 have variance 1; samples deviate by 0.5 from the mean of their class, with variance 0.25.
    styles = np.array([[-1.5], [-0.5], [0.5], [1.5]])
    assert variance_ratio(styles, np.array([0, 0, 1, 1])) == pytest.approx(4)
