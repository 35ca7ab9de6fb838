"""Outputs that have the same bits at every EP degree and under every placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import run_distributed
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.routing.routing_log import sample_forwards
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.transformers import causal_lm

EXPERTS, DIM, TOKENS, WORLD = 8, 32, 21, 4
ELSEWHERE = {
    1: ((3, 1, 0, 2, 7, 6, 5, 4),),
    2: ((7, 0, 2), (1, 3, 4, 5, 6, 0)),
    4: ((0, 4, 1), (0, 5), (6, 2, 3), (7, 1)),
}
"""By EP size: other orders, uneven ranks, replicas."""
LAYOUTS: list[dict[str, Any]] = [
    {"ep_size": ep_size, **more} for ep_size in (1, 2, 4) for more in ({}, {"elsewhere": True})
]


def outputs(dtype: torch.dtype, options: dict[str, Any], *, invariant: bool, **layout: Any) -> torch.Tensor:
    """Of this rank's tokens, after a loss whose backward runs, too. Experts have from none to many of them."""
    elsewhere = layout.pop("elsewhere", False)
    groups = make_expert_groups(**layout, ep_invariant=invariant)
    placement = ExpertPlacement(ELSEWHERE[layout["ep_size"]]) if elsewhere else "contiguous"
    layer = make_moe(DIM, 24, EXPERTS, 2, groups=groups, placement=placement, **options).to(dtype)
    with torch.no_grad():
        layer.router.weight.normal_(generator=torch.Generator().manual_seed(1))
        layer.router.weight[:3] += 1
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype) + 0.3
    y = layer(x.requires_grad_())
    y.square().mean().backward()
    assert x.grad is not None
    return torch.cat([y.detach(), x.grad])


def compared(dtype: torch.dtype, options: dict[str, Any]) -> tuple[list[bool], list[bool]]:
    """Whether this rank's outputs and gradients of inputs are those of EP 1, for each layout; with the setting, and
    without."""
    found = []
    for invariant in (True, False):
        first = outputs(dtype, options, invariant=invariant, ep_size=1)
        each = [outputs(dtype, options, invariant=invariant, **layout) for layout in LAYOUTS]
        for other in each:
            torch.testing.assert_close(other, first, rtol=0.05, atol=0.01)
        found.append([torch.equal(other, first) for other in each])
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"activation": "swiglu"}, {"capacity_factor": 1.2}], ids=str)
def test_every_ep_degree_and_placement_has_the_same_bits(dtype: torch.dtype, options: dict[str, Any]):
    with_setting, without = zip(*run_distributed(compared, WORLD, dtype, options), strict=True)
    assert all(map(all, with_setting)), with_setting
    assert not all(map(all, without)), "there was nothing to make equal"


def losses_of_a_language_model(ep_size: int) -> torch.Tensor:
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3MoeConfig(vocab_size=64, num_hidden_layers=2, num_experts=8, num_experts_per_tok=3, **sizes, **heads)
    torch.manual_seed(0)
    model: Any = causal_lm(config)
    shard_experts(model, make_expert_groups(ep_size, ep_invariant=True))
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
    return model(input_ids=ids, labels=ids).loss.detach()


def of_all_degrees() -> list[float]:
    return [float(losses_of_a_language_model(ep_size)) for ep_size in (1, 2, 4)]


def test_so_have_the_losses_of_transformers_mixtures():
    for losses in run_distributed(of_all_degrees, WORLD):
        assert losses[0] == losses[1] == losses[2], losses


def counted(invariant: bool) -> tuple[int, int]:
    """Bytes of a row there and back, as the log counts them; choices of what the guard takes for one token."""
    groups = make_expert_groups(2, ep_invariant=invariant)
    layer = make_moe(DIM, 24, EXPERTS, 2, groups=groups)
    layer(torch.randn(TOKENS, DIM)).sum().backward()
    (sample,) = sample_forwards([layer.expert_stack.log], 5)
    assert sample is not None
    return sample.row_bytes, sample.choices_STK.shape[-1]


@pytest.mark.parametrize(("invariant", "choices"), [(False, 2), (True, 1)])
def test_a_row_is_counted_with_the_choices_that_travel_with_it(invariant: bool, choices: int):
    for found in run_distributed(counted, 2, invariant):
        assert found == (2 * 4 * DIM + choices * (4 + 2), choices)  # weights, and half of the slots
