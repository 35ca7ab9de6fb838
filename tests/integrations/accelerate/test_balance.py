"""Expert loads and auxiliary losses without padding, and errors of two active auxiliary losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support.families import tokens
from benchmarks.support.precision import in_float64
from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import ToyLoop
from tests.integrations.peft.models import FAMILIES, base
from toolkit.errors import UserError
from toolkit.experts.layer.losses import RouterPenalty, global_load, load_balancing_share
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.collectives import sum_over_ranks
from toolkit.integrations.transformers import watch_routers

LENGTHS = (12, 7, 9, 3)


def balance_of_one_process(family: str) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return loads, auxiliary loss and router gradients of samples without padding, computed one at a time."""
    model = base(family).train()
    watches = watch_routers(model)
    found: list[list[Any]] = [[] for _ in watches]
    for sample, length in zip(tokens(0, len(LENGTHS)), LENGTHS, strict=True):
        model(input_ids=sample[None, :length])
        for parts, watch in zip(found, watches, strict=True):
            parts.append((watch.routing, watch.last_load_E))
    penalty: Any = 0.0
    loads = [sum(load for _, load in parts) for parts in found]
    for parts, load in zip(found, loads, strict=True):
        probs, logits = (torch.cat([getattr(r, name) for r, _ in parts]) for name in ("probs_TE", "logits_TE"))
        penalty = penalty + load_balancing_share(probs, load / load.sum(), sum(LENGTHS), probs.shape[1])
        penalty = penalty + 0.5 * logits.logsumexp(-1).square().mean()
    penalty = penalty / len(found)
    penalty.backward()
    return loads, penalty.detach(), [watch.module.weight.grad for watch in watches]


def balance_of_padded_batches(family: str) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]]:
    """Return loads of the layers and of the watches, auxiliary loss and router gradients, summed over ranks."""
    model = base(family).train()
    watches = watch_routers(model)
    penalty: Any = RouterPenalty(watches, balance_weight=1.0, z_weight=0.5)
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    ToyLoop(model=model, ep_size=2).model(input_ids=tokens(0, len(LENGTHS))[rows], attention_mask=mask[rows].long())
    share = penalty.share()
    share.backward()  # too few parameters for DDP to average anything
    grads = [sum_over_ranks(watch.module.weight.grad.clone()) for watch in watches]
    logs = [module.expert_stack.log.load_E for module in model.modules() if "expert_stack" in vars(module)]
    loads = [sum_over_ranks(load.clone()) for load in logs]
    return loads, list(global_load(watches)), sum_over_ranks(share.detach()), grads


def compare_families() -> None:
    with in_float64():
        for family in FAMILIES:
            expected_loads, expected, expected_grads = balance_of_one_process(family)
            loads, watched, penalty, grads = balance_of_padded_batches(family)
            torch.testing.assert_close(loads, expected_loads, rtol=0, atol=0, check_dtype=False, msg=family)
            torch.testing.assert_close(watched, expected_loads, rtol=0, atol=0, check_dtype=False, msg=family)
            # Some routers compute in float32.
            found = [penalty, *grads]
            torch.testing.assert_close(
                found, [expected, *expected_grads], rtol=0, atol=1e-6, check_dtype=False, msg=family
            )


def test_padding_counts_in_neither_load_nor_aux_loss() -> None:
    run_distributed(compare_families, 2)


class EmbeddingAndMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.moe = make_moe(8, 8, 4, 2, capacity_factor=8.0)
        self.moe.router.weight.data.normal_()

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.moe(self.embed(ids))


def load_and_penalty() -> tuple[list[int], float]:
    """Return the load and the penalty of sequences of 5 and 3 tokens, on two ranks with padding."""
    model = EmbeddingAndMoE()
    penalty: Any = RouterPenalty(model, balance_weight=1.0, z_weight=0.5)
    ids = torch.arange(10).view(2, 5)
    if not dist.is_initialized():
        model.moe(model.embed(torch.cat([ids[0], ids[1, :3]])))
        return model.moe.load_E.tolist(), float(penalty().detach())
    row = slice(dist.get_rank(), dist.get_rank() + 1)
    ToyLoop(model=model, ep_size=2).model(ids[row], torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])[row])
    return sum_over_ranks(model.moe.load_E).tolist(), float(sum_over_ranks(penalty().detach()) / 2)  # as DDP averages


def test_moe_layer_with_attention_mask_leaves_out_padding() -> None:
    expected, penalty = load_and_penalty()
    assert sum(expected) == 2 * 8
    assert run_distributed(load_and_penalty, 2) == [(expected, pytest.approx(penalty, rel=1e-5))] * 2


def test_packed_sequences_and_tokens_without_labels_count() -> None:
    model = base("mixtral").train()
    watches = watch_routers(model)
    ids = tokens(0, 2)
    restarting = torch.arange(12).remainder(6).expand(2, -1)
    model(input_ids=ids.long(), position_ids=restarting, labels=ids.where(restarting > 3, -100))
    assert [int(watch.last_load_E.sum()) for watch in watches] == [2 * ids.numel()] * 2


def test_generation_uses_the_mask_of_new_tokens() -> None:
    model = base("mixtral").eval()
    (watch, *_) = watch_routers(model)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    first = model(input_ids=tokens(0, 2)[:, :4], attention_mask=mask, use_cache=True)
    assert int(watch.last_load_E.sum()) == 2 * 6
    mask = torch.cat([mask, torch.tensor([[1], [0]])], dim=1)
    name = "cache" if "cache" in first else "past_key_values"  # since transformers 5.24, and before
    model(input_ids=tokens(0, 2)[:, 4:5], attention_mask=mask, **{name: first[name]})
    assert int(watch.last_load_E.sum()) == 2 * 1


def test_prepare_prints_the_active_balance_loss(capfd: pytest.CaptureFixture[str]) -> None:
    model = base("qwen3_moe")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.02
    ToyLoop(model=model)
    assert "router_aux_loss_coef=0.02" in capfd.readouterr().out
    model = base("mixtral")
    penalty = RouterPenalty(watch_routers(model), balance_weight=0.05)
    ToyLoop(model=model)
    assert "RouterPenalty, balance_weight=0.05" in capfd.readouterr().out
    assert penalty.layers


def test_two_balance_losses_raise() -> None:
    model, ids = base("mixtral"), tokens(0, 2)
    penalty = RouterPenalty(watch_routers(model), balance_weight=0.05)
    model(input_ids=ids, labels=ids)
    assert penalty() is not None
    model(input_ids=ids, labels=ids, output_router_logits=True)  # by an argument of the call
    with pytest.raises(UserError, match="output_router_logits = False"):
        penalty()
    model.config.output_router_logits = True
    with pytest.raises(UserError, match="output_router_logits = False"):
        ToyLoop(model=model)
