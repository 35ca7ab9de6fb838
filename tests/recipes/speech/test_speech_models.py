"""Encoders of speech: sizes, padding, streams."""

import pytest
import torch

from speech.speech_models import AttentionEncoder, MemoryEncoder, SpeechClassifier, SpeechRecogniser, Standardise
from tests.recipes.speech.sounds import draw

BANDS, OUTPUTS = 6, 5


def build(kind, head=SpeechRecogniser):
    torch.manual_seed(0)
    if kind == "memory":
        encoder = MemoryEncoder(BANDS, 8, channels=3, order=4, thetas=(6.0, 12.0))
    else:
        encoder = AttentionEncoder(BANDS, 8, order=4, thetas=(6.0, 12.0), head_size=4, dropout=0.0)
    return head(Standardise(torch.full((BANDS,), 0.5), torch.full((BANDS,), 2.0)), encoder, OUTPUTS).eval()


@pytest.mark.parametrize(
    ("width", "order", "layers", "outputs", "expected"),
    [(512, 256, 4, 32, 7_157_792), (512, 256, 4, 29, 7_156_253), (384, 192, 3, 34, 3_079_522)],
)
def test_encoder_of_guide_has_documented_parameter_count(width, order, layers, outputs, expected):
    guide = AttentionEncoder(80, width, order=order, thetas=(1000.0,) * layers)
    model = SpeechRecogniser(Standardise(torch.zeros(80), torch.ones(80)), guide, outputs)
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize("kind", ["memory", "attention"])
def test_padding_does_not_change_outputs(kind):
    utterance = draw(1, 9, BANDS)
    padded = torch.cat([utterance, 50 * draw(1, 8, BANDS, seed=1)], 1)
    batch, lengths = torch.cat([padded, draw(1, 17, BANDS, seed=2)]), torch.tensor([9, 17])
    model = build(kind)
    (single, steps), (found, all_steps) = model(utterance, lengths[:1]), model(batch, lengths)
    assert int(steps) == int(all_steps[0]) == single.shape[1]
    torch.testing.assert_close(found[:1, : int(steps)], single, atol=1e-5, rtol=1e-5)
    model = build(kind, SpeechClassifier)
    torch.testing.assert_close(model(batch, lengths)[:1], model(utterance, lengths[:1]), atol=1e-5, rtol=1e-5)


def test_outputs_of_stream_equal_outputs_of_utterance():
    model, features = build("memory"), draw(1, 40, BANDS)
    expected, _ = model(features, torch.tensor([40]))
    states, parts = None, []
    for piece in features.split([2, 8, 30], dim=1):
        part, states = model.advance(piece, states)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-5)


def test_stream_of_attention_encoder_raises():
    with pytest.raises(TypeError, match="attention needs the complete utterance"):
        build("attention").advance(draw(1, 4, BANDS), None)


@pytest.mark.parametrize("kind", ["memory", "attention"])
@pytest.mark.parametrize("head", [SpeechRecogniser, SpeechClassifier])
def test_empty_batch_gives_zero_gradients(kind, head):
    model = build(kind, head).train()
    result = model(torch.zeros(0, 1, BANDS), torch.zeros(0, dtype=torch.long))
    (result[0] if head is SpeechRecogniser else result).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
