"""What is equal up to rounding: one measure for all comparisons of many processes with one."""

from __future__ import annotations

from torch import Tensor


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def assert_equal_rows(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each row, "<parameter>/<id>", differs by no more than `tolerance` times the norm of its whole parameter."""
    assert found.keys() == expected.keys()
    squares: dict[str, float] = {}
    for name, value in expected.items():
        parameter = name.partition("/")[0]
        squares[parameter] = squares.get(parameter, 0.0) + value.square().sum().item()
    for name, value in expected.items():
        difference = (found[name] - value).norm().item()
        assert difference <= tolerance * squares[name.partition("/")[0]] ** 0.5, name
