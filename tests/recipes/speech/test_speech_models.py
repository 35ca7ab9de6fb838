"""Encoders of speech: sizes, batches that are filled up, streams."""

import pytest
import torch
from torch import Tensor

from speech.speech_models import (
    AttentionEncoder,
    MemoryEncoder,
    SpeechClassifier,
    SpeechRecogniser,
    Standardise,
)

BANDS, OUTPUTS = 6, 5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def standardise() -> Standardise:
    return Standardise(torch.full((BANDS,), 0.5), torch.full((BANDS,), 2.0))


def encoder(kind: str) -> MemoryEncoder | AttentionEncoder:
    torch.manual_seed(0)
    if kind == "memory":
        return MemoryEncoder(BANDS, 8, channels=3, order=4, thetas=(6.0, 12.0))
    return AttentionEncoder(BANDS, 8, order=4, thetas=(6.0, 12.0), head_size=4, dropout=0.0)


@pytest.mark.parametrize(
    ("width", "order", "layers", "outputs", "expected"),
    [(512, 256, 4, 32, 7_157_792), (512, 256, 4, 29, 7_156_253), (384, 192, 3, 34, 3_079_522)],
)
def test_the_guides_encoder_has_exactly_the_guides_parameters(width, order, layers, outputs, expected):
    guide = AttentionEncoder(80, width, order=order, thetas=(1000.0,) * layers)
    model = SpeechRecogniser(Standardise(torch.zeros(80), torch.ones(80)), guide, outputs)
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize("kind", ["memory", "attention"])
def test_what_a_batch_is_filled_up_with_changes_no_utterance(kind):
    for head in (SpeechRecogniser, SpeechClassifier):
        model, utterance = head(standardise(), encoder(kind), OUTPUTS).eval(), draw(1, 9, BANDS)
        filled = torch.cat([utterance, 50 * draw(1, 8, BANDS, seed=1)], 1)
        batch, lengths = torch.cat([filled, draw(1, 17, BANDS, seed=2)]), torch.tensor([9, 17])
        alone, together = model(utterance, lengths[:1]), model(batch, lengths)
        if head is SpeechRecogniser:
            (alone, steps), (together, all_steps) = alone, together
            assert int(steps) == int(all_steps[0]) == alone.shape[1]
            together = together[:, : int(steps)]
        torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)


def test_a_stream_in_pieces_is_heard_as_a_whole():
    model, features = SpeechRecogniser(standardise(), encoder("memory"), OUTPUTS).eval(), draw(1, 40, BANDS)
    whole, _ = model(features, torch.tensor([40]))
    states, parts = None, []
    for piece in features.split([2, 8, 30], dim=1):
        part, states = model.advance(piece, states)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def test_an_encoder_that_looks_ahead_refuses_a_stream():
    model = SpeechRecogniser(standardise(), encoder("attention"), OUTPUTS)
    with pytest.raises(TypeError, match="attention needs the complete utterance"):
        model.advance(draw(1, 4, BANDS), None)


def test_a_causal_encoder_does_not_hear_the_future():
    model, features = SpeechRecogniser(standardise(), encoder("memory"), OUTPUTS).eval(), draw(1, 20, BANDS)
    changed = features.clone()
    changed[:, 12:] += 1
    before, after = (model(x, torch.tensor([20]))[0] for x in (features, changed))
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])


@pytest.mark.parametrize("kind", ["memory", "attention"])
@pytest.mark.parametrize("head", [SpeechRecogniser, SpeechClassifier])
def test_a_batch_without_utterances_still_reaches_every_parameter(kind, head):
    model = head(standardise(), encoder(kind), OUTPUTS)
    result = model(torch.zeros(0, 1, BANDS), torch.zeros(0, dtype=torch.long))
    (result[0] if head is SpeechRecogniser else result).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
