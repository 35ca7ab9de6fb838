"""The reference's model: its densities are densities, and its bound is one."""

from __future__ import annotations

import pytest
import torch

from toolkit.models.relaxed_vae import RelaxedVAE, concrete_log_density
from toolkit.tasks import RelaxedBound


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


def test_the_density_of_a_relaxed_class_integrates_to_one():
    # Two classes: y = (u, 1 - u), and a density over u.
    u = torch.linspace(1e-5, 1 - 1e-5, 400_001, dtype=torch.float64)
    y = torch.stack([u, 1 - u], -1)
    total = torch.trapezoid(concrete_log_density(y.log(), torch.tensor([0.7, -0.4], dtype=torch.float64)).exp(), u)
    assert total.item() == pytest.approx(1, abs=0.02)


def test_samples_follow_the_probabilities_of_their_classes():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    normal = torch.randn(1, 40_000, 3, generator=torch.Generator().manual_seed(0))
    y = model().relaxed(logits, normal)[0].exp()
    assert torch.allclose(y.sum(-1), torch.ones(40_000), atol=1e-5)
    shares = torch.bincount(y.argmax(-1), minlength=3) / 40_000
    # The greatest entry is class k with the probability of k, at any temperature.
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.01)


@pytest.mark.parametrize("gap", [0.0, 5.0, 40.0])
def test_no_class_is_so_certain_that_it_costs_less_than_nothing(gap: float):
    """KL(q || p) is not negative. It was, by hundreds, where samples were rounded up before their density was taken."""
    logits = torch.tensor([[gap, 0.0, -gap]])
    log_y = model().relaxed(logits, torch.randn(1, 20_000, 3, generator=torch.Generator().manual_seed(0)))
    divergence = concrete_log_density(log_y, logits[:, None]) - concrete_log_density(log_y, torch.zeros(1, 1, 3))
    assert divergence.mean() >= -1e-4
    assert (divergence.mean() > 1) == (gap > 0)


def test_weights_are_those_of_torch_distributions():
    network, examples = model(), batch()
    noise = examples["noise"]
    x = examples["input"].flatten(1) / 255
    out = network(examples["input"], noise)
    hidden = network.stem(x).relu()
    y = network.relaxed(network.to_logits(hidden), noise[..., :3]).exp()
    inputs = torch.cat([y, hidden[:, None].expand(-1, 8, -1)], -1)
    mean, log_std = network.to_style(inputs).chunk(2, -1)
    q = torch.distributions.Normal(mean, log_std.exp())
    z = mean + log_std.exp() * noise[..., 3:]
    logits = network.decoder(torch.cat([y, z], -1))
    likelihood = torch.distributions.Bernoulli(logits=logits, validate_args=False).log_prob(x[:, None]).sum(-1)
    temperature, class_logits = torch.tensor(0.66), network.to_logits(hidden)[:, None]
    relaxed = torch.distributions.RelaxedOneHotCategorical(temperature, logits=class_logits, validate_args=False)
    assert torch.allclose(out["log_q"], relaxed.log_prob(y), atol=1e-3)
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    expected = likelihood + prior - q.log_prob(z).sum(-1)
    assert torch.allclose(out["log_weight"], expected, atol=1e-3)


def test_a_known_class_is_used_and_rewarded():
    network, examples = model(), batch()
    weights = [RelaxedBound(weight).loss(network, examples) for weight in (0.0, 3.0)]
    log_q = network(examples["input"], examples["noise"], label=examples["label"])["log_q"].mean(-1)
    known = examples["label"] != -1
    assert torch.allclose(weights[0].sum - weights[1].sum, 3 * log_q[known].sum(), rtol=1e-4)
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
