"""The nonlinear unit, whose backward is written by hand, and the parallel one."""

import pytest
import torch
from torch import Tensor

from speech.legendre import LegendreMemory
from speech.lmu import LMU, ParallelLMU


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_the_book(unit: LMU, x: Tensor) -> Tensor:
    """Equations 6 and 7, one step at a time, left to autograd."""
    h, m = x.new_zeros(len(x), len(unit.e_h)), x.new_zeros(len(x), len(unit.e_m))
    outputs = []
    for step in x.unbind(1):
        u = step @ unit.e_x + h @ unit.e_h + m @ unit.e_m
        m = m @ unit.A.T + u[:, None] * unit.B
        h = torch.tanh(step @ unit.W_x.T + h @ unit.W_h.T + m @ unit.W_m.T)
        outputs.append(h)
    return torch.stack(outputs, 1)


def test_the_unit_is_its_equations_and_so_are_its_gradients():
    torch.manual_seed(0)
    unit = LMU(3, 6, 5, 9.0).double()
    torch.nn.init.normal_(unit.e_m, std=0.3)
    x, cotangent = draw(2, 40, 3).double(), draw(2, 40, 6, seed=1).double()
    results = []
    for forward in (lambda x: by_the_book(unit, x), lambda x: unit(x)[0]):
        unit.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.backward(cotangent)
        results.append([y, leaf.grad, *(p.grad.clone() for p in unit.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_sequence_may_come_in_pieces_and_gradients_flow_through_the_state():
    torch.manual_seed(0)
    unit = LMU(2, 4, 3, 6.0).double()
    x = draw(2, 11, 2).double()
    whole, _ = unit(x)
    first, state = unit(x[:, :4])
    second, end = unit(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end[0], whole[:, -1])
    gradients = [torch.autograd.grad(y.sum(), unit.W_h, retain_graph=True)[0] for y in (whole[:, -1], end[0])]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("form", ["chunks", "fft"])
def test_the_parallel_unit_is_the_same_unit_step_by_step(form):
    torch.manual_seed(0)
    units = [ParallelLMU(3, 8, 6, 20.0, channels=2, form=form), ParallelLMU(3, 8, 6, 20.0, channels=2, form="steps")]
    units[1].load_state_dict(units[0].state_dict())
    x, gradients = draw(2, 50, 3), []
    outputs = [unit(x)[0] for unit in units]
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=0)
    for unit, output in zip(units, outputs, strict=True):
        output.square().sum().backward()
        gradients.append([p.grad for p in unit.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()
    torch.testing.assert_close(units[0].last(x), outputs[0][:, -1], atol=1e-4, rtol=0)


def test_half_precision_outside_does_not_reach_the_memory():
    unit, x = LMU(1, 8, 16, 100.0), draw(2, 100, 1)
    expected = unit(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(unit(x)[0], expected)


def test_a_unit_that_remembers_its_input_starts_with_the_linear_memory_of_it():
    torch.manual_seed(0)
    unit, memory = LMU(1, 8, 6, 20.0, remembers_input=True), LegendreMemory(6, 20.0)
    x = draw(2, 50, 1)
    h, (_, m) = unit(x)
    (expected, _), last = memory(x), memory.last(x).squeeze(1)
    torch.testing.assert_close(m, last, atol=1e-5, rtol=0)
    torch.testing.assert_close(h, torch.tanh(expected.squeeze(2) @ unit.W_m.T), atol=1e-5, rtol=0)
