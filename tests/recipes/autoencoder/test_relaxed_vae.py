"""The reference's model: its samples are samples of its classes, and its bound is one."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from autoencoder.relaxed_vae import RelaxedBound, RelaxedVAE


def model() -> RelaxedVAE:
    torch.manual_seed(0)
    return RelaxedVAE(num_pixels=6, num_classes=3, style_dim=2, hidden=8)


def batch(count: int = 6) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {
        "input": torch.randint(0, 256, (count, 2, 3), dtype=torch.uint8, generator=draws),
        "label": torch.arange(count) % 4 - 1,
        "noise": torch.randn(count, 8, 5, generator=draws),
    }


def test_it_has_as_many_parameters_as_the_reference():
    assert sum(parameter.numel() for parameter in RelaxedVAE().parameters()) == 415_734


def test_samples_follow_the_probabilities_of_their_classes():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    normal = torch.randn(1, 40_000, 3, generator=torch.Generator().manual_seed(0))
    y = model().relaxed(logits, normal)[0]
    assert torch.allclose(y.sum(-1), torch.ones(40_000), atol=1e-5)
    shares = torch.bincount(y.argmax(-1), minlength=3) / 40_000
    # The greatest entry is class k with the probability of k, at any temperature.
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.01)


def test_weights_are_those_of_torch_distributions():
    network, examples = model(), batch()
    noise = examples["noise"]
    x = examples["input"].flatten(1) / 255
    out = network(examples["input"], noise)
    hidden = network.stem(x).relu()
    y = network.relaxed(network.to_logits(hidden), noise[..., :3])
    inputs = torch.cat([y, hidden[:, None].expand(-1, 8, -1)], -1)
    mean, log_std = network.to_style(inputs).chunk(2, -1)
    q = torch.distributions.Normal(mean, log_std.exp())
    z = mean + log_std.exp() * noise[..., 3:]
    logits = network.decoder(torch.cat([y, z], -1))
    likelihood = torch.distributions.Bernoulli(logits=logits, validate_args=False).log_prob(x[:, None]).sum(-1)
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    expected = likelihood + prior - q.log_prob(z).sum(-1)
    assert torch.allclose(out["log_weight"], expected, atol=1e-3)


def test_a_known_class_is_used_and_rewarded():
    network, examples = model(), batch()
    weights = [RelaxedBound(weight).loss(network, examples) for weight in (0.0, 3.0)]
    logits = network(examples["input"], examples["noise"], label=examples["label"])["logits"]
    known = examples["label"] != -1
    penalty = F.cross_entropy(logits[known], examples["label"][known], reduction="sum")
    assert torch.allclose(weights[1].sum - weights[0].sum, 3 * penalty, rtol=1e-4)
    assert weights[1].sum.isfinite()


def test_an_unknown_label_changes_nothing():
    network, examples = model(), batch()
    unknown = examples | {"label": torch.full_like(examples["label"], -1)}
    plain = -network(examples["input"], examples["noise"])["log_weight"].mean(-1).sum()
    assert torch.allclose(RelaxedBound(50.0).loss(network, unknown).sum, plain)


def test_an_empty_batch_reaches_every_parameter():
    network = model()
    empty = {name: column[:0] for name, column in batch().items()}
    RelaxedBound(1.0).loss(network, empty).sum.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
