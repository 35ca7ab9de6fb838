"""The Accelerator of a run: what the environment says to it."""

from __future__ import annotations

import pytest

from toolkit.errors import UserError
from toolkit.run.accelerator import build_accelerator
from toolkit.run.config.run import RunConfig


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ACCELERATE_USE_CPU", "maybe", "=maybe: is neither true nor false: take one, or unset it."),
        ("ACCELERATE_TORCH_DEVICE", "hpu:0", "=hpu:0: there is no such device here: unset it."),
        (
            "ACCELERATE_MIXED_PRECISION",
            "fp8",
            "=fp8: a run has no such precision: give --mixed-precision no, ",
        ),
    ],
)
def test_a_variable_that_accelerate_cannot_follow_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refusal:
        build_accelerator(RunConfig(cpu=True))
    assert str(refusal.value).startswith(name + says)


def test_a_flag_counts_more_than_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert build_accelerator(RunConfig(cpu=True, mixed_precision="no")).mixed_precision == "no"
