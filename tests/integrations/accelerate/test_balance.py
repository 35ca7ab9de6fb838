"""Expert load and aux losses count tokens and no padding, and two aux losses raise."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support.families import tokens
from benchmarks.support.precision import in_float64
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import FAMILIES, base
from toolkit.errors import UserError
from toolkit.experts.layer.losses import RouterPenalty, global_load, load_balancing_share
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.collectives import sum_over_ranks
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import watch_routers

LENGTHS = (12, 7, 9, 3)


def prepared(model: nn.Module, ep_size: int) -> tuple[Any, str]:
    """The wrapped model, and the last line that `prepare` printed."""
    from accelerate import Accelerator

    optimizer: Any = torch.optim.AdamW(model.parameters())
    with contextlib.redirect_stdout(io.StringIO()) as said:
        wrapped, _ = ExpertParallel(Accelerator(cpu=True), ep_size=ep_size).prepare(model, optimizer)
    return wrapped, (said.getvalue().splitlines() or [""])[-1]


def without_padding(family: str) -> tuple[list[Tensor], float, list[Tensor]]:
    """Loads, penalty and the routers' gradients of samples that one process computes one at a time."""
    model = base(family).train()
    watches = watch_routers(model)
    found: list[list[Any]] = [[] for _ in watches]
    for sample, length in zip(tokens(0, len(LENGTHS)), LENGTHS, strict=True):
        model(input_ids=sample[None, :length])
        for parts, watch in zip(found, watches, strict=True):
            parts.append((watch.routing, watch.last_load_E))
    penalty: Any = 0.0
    for parts in found:
        probs, logits = (torch.cat([getattr(r, name) for r, _ in parts]) for name in ("probs_TE", "logits_TE"))
        load = sum(load for _, load in parts)
        penalty = penalty + load_balancing_share(probs, load / load.sum(), sum(LENGTHS), probs.shape[1])
        penalty = penalty + 0.5 * logits.logsumexp(-1).square().mean()
    (penalty / len(found)).backward()
    return [sum(load for _, load in p) for p in found], float(penalty.detach()) / len(found), gradients(watches)


def gradients(watches: Any) -> list[Tensor]:
    return [watch.module.weight.grad.clone() for watch in watches]


def with_padding(family: str) -> tuple[list[Tensor], list[Tensor], float, list[Tensor]]:
    """Loads by the logs and by the watches, penalty and the routers' gradients, of ranks with a padded batch each."""
    model = base(family).train()
    watches = watch_routers(model)
    penalty = RouterPenalty(watches, balance_weight=1.0, z_weight=0.5)
    wrapped, _ = prepared(model, 2)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    wrapped(input_ids=tokens(0, len(LENGTHS))[mine], attention_mask=mask[mine].long())
    share = penalty()
    assert share is not None
    share.backward()  # too few parameters for DDP to average anything
    grads = [sum_over_ranks(grad) for grad in gradients(watches)]
    logs = [module.expert_stack.log.load_E for module in model.modules() if "expert_stack" in vars(module)]
    return [sum_over_ranks(load.clone()) for load in logs], list(global_load(watches)), float(share.detach()), grads


def compare_families() -> list[tuple[str, float, float]]:
    """The largest differences of penalty and gradients. Loads are equal."""
    found = []
    with in_float64():
        for family in FAMILIES:
            loads, expected, grads = without_padding(family)
            logged, watched, share, found_grads = with_padding(family)
            for load, log, watch in zip(loads, logged, watched, strict=True):
                assert load.tolist() == log.tolist() == watch.tolist(), family
            off = max(float((a - b).abs().max()) for a, b in zip(found_grads, grads, strict=True))
            found.append((family, abs(float(sum_over_ranks(torch.tensor(share))) - expected), off))
    return found


def test_padding_counts_in_neither_load_nor_aux_loss():
    for rank in run_distributed(compare_families, 2):
        assert max(max(each[1:]) for each in rank) < 1e-6, rank  # some routers compute in float32


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.mixture = make_moe(8, 8, 4, 2, capacity_factor=8.0)
        self.mixture.router.weight.data.normal_()

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.mixture(self.embed(ids))


def our_layer() -> tuple[list[int], float]:
    """The load and the penalty of two sequences of 5 and 3 tokens, padded where there are two processes."""
    model = Ours()
    penalty = RouterPenalty(model, balance_weight=1.0, z_weight=0.5)
    ids = torch.arange(10).view(2, 5)
    if dist.is_initialized():
        rank = dist.get_rank()
        wrapped, _ = prepared(model, 2)
        wrapped(ids[rank : rank + 1], torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])[rank : rank + 1])
        return sum_over_ranks(model.mixture.load_E).tolist(), float(sum_over_ranks(penalty().detach()))
    model.mixture(model.embed(torch.cat([ids[0], ids[1, :3]])))
    return model.mixture.load_E.tolist(), float(penalty().detach())


def test_moe_layer_with_attention_mask_leaves_out_padding():
    expected, penalty = our_layer()
    assert sum(expected) == 2 * 8
    assert run_distributed(our_layer, 2) == [(expected, pytest.approx(penalty, rel=1e-5))] * 2


def test_packed_sequences_and_tokens_without_labels_count():
    model = base("mixtral").train()
    watches = watch_routers(model)
    ids = tokens(0, 2)
    restarting = torch.arange(12).remainder(6).expand(2, -1)
    model(input_ids=ids.long(), position_ids=restarting, labels=ids.where(restarting > 3, -100))
    assert [int(watch.last_load_E.sum()) for watch in watches] == [2 * ids.numel()] * 2


def test_generation_uses_the_mask_of_new_tokens():
    model = base("mixtral").eval()
    (watch, *_) = watch_routers(model)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    first = model(input_ids=tokens(0, 2)[:, :4], attention_mask=mask, use_cache=True)
    assert int(watch.last_load_E.sum()) == 2 * 6
    mask = torch.cat([mask, torch.tensor([[1], [0]])], dim=1)
    name = "cache" if "cache" in first else "past_key_values"  # since transformers 5.24, and before
    model(input_ids=tokens(0, 2)[:, 4:5], attention_mask=mask, **{name: first[name]})
    assert int(watch.last_load_E.sum()) == 2 * 1


# --- which aux loss is active ----------------------------------------------------------------------------------------


def test_prepare_prints_the_active_balance_loss() -> None:
    model = base("qwen3_moe")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.02
    own = prepared(model, 1)[1]
    assert "router_aux_loss_coef=0.02" in own
    model = base("mixtral")
    penalty = RouterPenalty(watch_routers(model), balance_weight=0.05)
    assert "RouterPenalty, balance_weight=0.05" in prepared(model, 1)[1]
    assert penalty.layers


def test_two_balance_losses_raise() -> None:
    model, ids = base("mixtral"), tokens(0, 2)
    penalty = RouterPenalty(watch_routers(model), balance_weight=0.05)
    model(input_ids=ids, labels=ids)
    assert penalty() is not None
    model(input_ids=ids, labels=ids, output_router_logits=True)  # by an argument of the call
    with pytest.raises(UserError, match="output_router_logits = False"):
        penalty()
    model = base("mixtral")
    model.config.output_router_logits = True
    kept = RouterPenalty(watch_routers(model), balance_weight=0.05)
    with pytest.raises(UserError, match="output_router_logits = False"):
        prepared(model, 1)
    assert kept.layers
