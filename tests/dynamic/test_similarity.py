"""Alignment of hidden units before experts are compared or averaged."""

import pytest
import torch

from toolkit.dynamic.similarity import alignment, reordered, weight_similarity


def expert_rows(seed: int, *, gated: bool = False) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    up = torch.randn(24 if gated else 12, 7, generator=draws)
    return {"up": up, "down": torch.randn(12, 7, generator=draws), "up.exp_avg": up * 2}


@pytest.mark.parametrize("gated", [False, True])
def test_alignment_reorders_a_permuted_expert(gated):
    expert, order = expert_rows(0, gated=gated), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    other = reordered(expert, order)
    assert not torch.equal(other["up"], expert["up"])
    back = reordered(other, alignment(expert, other))
    for name, rows in expert.items():
        assert torch.equal(back[name], rows), name
    assert weight_similarity(expert, other) == pytest.approx(1)


def test_similarity_ignores_how_scale_is_split_between_up_and_down():
    expert = expert_rows(0)
    factors = torch.rand(12, 1, generator=torch.Generator().manual_seed(2)) + 0.5
    other = {"up": expert["up"] * factors, "down": expert["down"] / factors}
    assert weight_similarity(expert, other) == pytest.approx(1)
