"""The convolutional classifier and its averaged weights."""

from types import SimpleNamespace

import pytest
import torch

from digits.classifier import ConvolutionalClassifier, WeightAverage


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


@pytest.mark.parametrize("shape", [(28, 28), (3, 12, 21), (1, 9, 5)])
def test_classifier_takes_any_image_size_and_channels(shape):
    model = ConvolutionalClassifier(shape=shape, num_classes=4, width=2).eval()
    assert model(torch.zeros(3, *shape, dtype=torch.uint8))["logits"].shape == (3, 4)
