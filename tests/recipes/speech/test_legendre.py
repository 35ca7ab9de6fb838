"""The forms of a Legendre memory are one thing, and it remembers what it should."""

import numpy as np
import pytest
import torch

from speech.legendre import LegendreMemory, delay_system, impulse_response

FORMS = ["steps", "chunks", "fft"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("steps", "order", "theta"), [(1, 4, 8.0), (31, 6, 10.0), (65, 16, 50.0), (784, 64, 784.0)])
def test_every_form_gives_the_same_memory_and_gradients_at_any_length(form, steps, order, theta):
    signal, cotangent = draw(2, steps, 3), draw(2, steps, 3, order, seed=1)
    memories, gradients = [], []
    for which in ("steps", form):
        memory, u = LegendreMemory(order, theta, form=which), signal.clone().requires_grad_()
        memories.append(memory(u)[0])
        memories[-1].backward(cotangent)
        gradients.append(u.grad)
    assert (memories[1] - memories[0]).abs().max() <= 1e-4 * memories[0].abs().max()
    assert (gradients[1] - gradients[0]).abs().max() <= 1e-4 * gradients[0].abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_a_signal_may_come_in_pieces(form):
    memory, signal = LegendreMemory(8, 20.0, form=form), draw(2, 70, 3)
    whole, end = memory(signal)
    state, parts = None, []
    for piece in signal.split([1, 0, 40, 29], dim=1):
        part, state = memory(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state, end, atol=1e-5, rtol=1e-4)


def test_the_last_memory_alone_is_the_last_of_all():
    memory, signal = LegendreMemory(16, 100.0), draw(3, 150, 2)
    torch.testing.assert_close(memory.last(signal), memory(signal)[0][:, -1], atol=1e-5, rtol=1e-4)


def test_what_an_utterance_is_filled_up_with_does_not_change_its_memory():
    memory, signal = LegendreMemory(8, 20.0), draw(1, 40, 2)
    filled = torch.cat([signal, 100 * draw(1, 23, 2, seed=1)], 1)
    torch.testing.assert_close(memory(filled)[0][:, :40], memory(signal)[0])


def test_the_memory_reads_out_what_the_signal_was_theta_steps_ago():
    # The delayed value is the sum of the coefficients, because every shifted Legendre polynomial is 1 at the far end.
    theta, time = 60, torch.arange(400.0)
    signal = torch.sin(2 * torch.pi * time / 80)
    memory = LegendreMemory(14, float(theta))(signal[None, :, None])[0][0, :, 0]
    # A value is held from its step to the next, so it is half a step younger than its number says.
    expected = (signal[200 - theta : -theta] + signal[201 - theta : 400 - theta + 1]) / 2
    assert (memory.sum(-1)[200:] - expected).abs().max() < 0.005


def test_the_delay_system_is_discretised_as_by_scipy():
    from scipy.signal import cont2discrete

    order, theta = 5, 7.0
    i = np.arange(order)[:, None]
    j = np.arange(order)[None]
    a = (2 * i + 1) / theta * np.where(i < j, -1.0, (-1.0) ** (i - j + 1))
    b = (2 * i + 1) / theta * (-1.0) ** i
    expected = cont2discrete((a, b, np.eye(order), np.zeros((order, 1))), 1.0, method="zoh")
    found = delay_system(order, theta)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-12)
    np.testing.assert_allclose(found[1], expected[1][:, 0], atol=1e-12)


def test_the_impulse_response_is_what_an_impulse_leaves():
    a, b = delay_system(4, 9.0)
    impulse = torch.zeros(1, 9, 1)
    impulse[0, 0] = 1
    torch.testing.assert_close(
        LegendreMemory(4, 9.0, form="steps")(impulse)[0][0, :, 0], impulse_response(a, b, 9).float()
    )
