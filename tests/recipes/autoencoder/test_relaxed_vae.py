"""The reference's model: relaxed samples, importance weights, and the bound."""

import torch
from torch.nn import functional as F

from autoencoder.relaxed_vae import RelaxedBound, RelaxedVAE
from tests.recipes.pieces import assert_sum_over_samples


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
