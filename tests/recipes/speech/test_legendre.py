"""Legendre memories, the units that contain them, and encoders of speech."""

import numpy as np
import pytest
import torch
from scipy.signal import cont2discrete

from speech.legendre import LegendreMemory, delay_system
from speech.lmu import LMU, ParallelLMU
from speech.speech_models import AttentionEncoder, MemoryEncoder, SpeechClassifier, SpeechRecogniser, Standardise
from tests.recipes.speech.sounds import draw

FORMS = ["steps", "chunks", "fft"]


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize(("steps", "order", "theta"), [(1, 4, 8.0), (31, 6, 10.0), (65, 16, 50.0), (784, 64, 784.0)])
def test_forms_give_equal_memory_and_gradients(form, steps, order, theta):
    signal, cotangent = draw(2, steps, 3), draw(2, steps, 3, order, seed=1)
    results = []
    for which in ("steps", form):
        memory, u = LegendreMemory(order, theta, form=which), signal.clone().requires_grad_()
        m = memory(u)[0]
        m.backward(cotangent)
        results.append((m, u.grad))
    for expected, found in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_memory_of_pieces_equals_memory_of_signal(form):
    memory, signal = LegendreMemory(8, 20.0, form=form), draw(2, 70, 3)
    expected, end = memory(signal)
    state, parts = None, []
    for piece in signal.split([1, 0, 40, 29], dim=1):
        part, state = memory(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state, end, atol=1e-5, rtol=1e-4)


def test_memory_reads_out_signal_delayed_by_theta():
    # The delayed value is the sum of the coefficients, because every shifted Legendre polynomial is 1 at the far end.
    theta, time = 60, torch.arange(400.0)
    signal = torch.sin(2 * torch.pi * time / 80)
    memory = LegendreMemory(14, float(theta))(signal[None, :, None])[0][0, :, 0]
    # A value is held for a step, so its mean age is half a step less than its index.
    expected = (signal[200 - theta : -theta] + signal[201 - theta : 400 - theta + 1]) / 2
    assert (memory.sum(-1)[200:] - expected).abs().max() < 0.005


def test_delay_system_equals_scipy_discretisation():
    order, theta = 5, 7.0
    i = np.arange(order)[:, None]
    j = np.arange(order)[None]
    a = (2 * i + 1) / theta * np.where(i < j, -1.0, (-1.0) ** (i - j + 1))
    b = (2 * i + 1) / theta * (-1.0) ** i
    expected = cont2discrete((a, b, np.eye(order), np.zeros((order, 1))), 1.0, method="zoh")
    found = delay_system(order, theta)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-12)
    np.testing.assert_allclose(found[1], expected[1][:, 0], atol=1e-12)


def reference(unit, x):
    """Compute equations 6 and 7 step by step with autograd."""
    h, m = x.new_zeros(len(x), len(unit.e_h)), x.new_zeros(len(x), len(unit.e_m))
    outputs = []
    for step in x.unbind(1):
        u = step @ unit.e_x + h @ unit.e_h + m @ unit.e_m
        m = m @ unit.A.T + u[:, None] * unit.B
        h = torch.tanh(step @ unit.W_x.T + h @ unit.W_h.T + m @ unit.W_m.T)
        outputs.append(h)
    return torch.stack(outputs, 1)


def test_lmu_equals_reference_with_gradients():
    torch.manual_seed(0)
    unit = LMU(3, 6, 5, 9.0).double()
    torch.nn.init.normal_(unit.e_m, std=0.3)
    x, cotangent = draw(2, 40, 3).double(), draw(2, 40, 6, seed=1).double()
    results = []
    for forward in (lambda x: reference(unit, x), lambda x: unit(x)[0]):
        unit.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.backward(cotangent)
        results.append([y, leaf.grad, *(p.grad.clone() for p in unit.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_lmu_of_pieces_equals_sequence_with_gradients_through_state():
    torch.manual_seed(0)
    unit = LMU(2, 4, 3, 6.0).double()
    x = draw(2, 11, 2).double()
    expected, _ = unit(x)
    first, state = unit(x[:, :4])
    second, end = unit(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), expected)
    torch.testing.assert_close(end[0], expected[:, -1])
    gradients = [torch.autograd.grad(y.sum(), unit.W_h, retain_graph=True)[0] for y in (expected[:, -1], end[0])]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("form", FORMS)
def test_last_output_of_parallel_lmu_equals_output_of_last_step(form):
    torch.manual_seed(0)
    unit, x = ParallelLMU(3, 8, 6, 20.0, channels=2, form=form), draw(2, 50, 3)
    torch.testing.assert_close(unit.last(x), unit(x)[0][:, -1], atol=1e-4, rtol=0)


def test_autocast_does_not_change_memory():
    unit, x = LMU(1, 8, 16, 100.0), draw(2, 100, 1)
    expected = unit(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(unit(x)[0], expected)


def test_unit_that_remembers_input_starts_with_linear_memory():
    torch.manual_seed(0)
    unit, memory = LMU(1, 8, 6, 20.0, remembers_input=True), LegendreMemory(6, 20.0)
    x = draw(2, 50, 1)
    h, (_, m) = unit(x)
    (expected, _), last = memory(x), memory.last(x).squeeze(1)
    torch.testing.assert_close(m, last, atol=1e-5, rtol=0)
    torch.testing.assert_close(h, torch.tanh(expected.squeeze(2) @ unit.W_m.T), atol=1e-5, rtol=0)


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
