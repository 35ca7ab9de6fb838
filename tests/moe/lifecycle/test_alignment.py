"""Hidden units are matched before experts are compared or averaged."""

from __future__ import annotations

import pytest
import torch

from toolkit.moe.lifecycle.alignment import alignment, reordered, similarity


def an_expert(seed: int, *, gated: bool = False) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    up = torch.randn(24 if gated else 12, 7, generator=draws)
    return {"up": up, "down": torch.randn(12, 7, generator=draws), "up.exp_avg": up * 2}


@pytest.mark.parametrize("gated", [False, True])
def test_a_permuted_expert_is_recognised_and_put_back_in_order(gated: bool) -> None:
    expert, order = an_expert(0, gated=gated), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    other = reordered(expert, order)
    assert not torch.equal(other["up"], expert["up"])
    back = reordered(other, alignment(expert, other))
    for name, rows in expert.items():
        assert torch.equal(back[name], rows), name
    assert similarity(expert, other) == pytest.approx(1)


def test_the_scale_of_a_unit_may_sit_on_either_side() -> None:
    expert = an_expert(0)
    factors = torch.rand(12, 1, generator=torch.Generator().manual_seed(2)) + 0.5
    other = {"up": expert["up"] * factors, "down": expert["down"] / factors}
    assert similarity(expert, other) == pytest.approx(1)


def test_strangers_are_not_alike() -> None:
    assert similarity(an_expert(0), an_expert(1)) < 0.5
