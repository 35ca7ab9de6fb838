"""Experts and routers of transformers models, and aux losses of their routing."""

from pathlib import Path

import pytest
import torch

from benchmarks.support.families import EXPERTS, FAMILIES, build, model_of, outputs, tokens
from benchmarks.support.processes import run_distributed
from tests.integrations.transformers.training import enable_checkpointing, prepare
from toolkit.errors import UserError
from toolkit.experts.layer.losses import RouterPenalty, load_balancing_share
from toolkit.integrations.transformers import causal_lm, experts_modules, watch_routers
from toolkit.integrations.transformers.router_watch import has_sigmoid_scores


def test_watch_routers_of_dense_model_raises():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = causal_lm(LlamaConfig(vocab_size=64, **sizes))
    assert experts_modules(model) == {}
    with pytest.raises(UserError, match="has no experts to balance"):
        watch_routers(model)


def prepare_sharded(folder: Path) -> None:
    from transformers.distributed import DistributedConfig

    model = causal_lm(folder, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2))
    with pytest.raises(UserError, match="has no experts that can be sharded"):
        prepare(model)


def test_prepare_of_experts_sharded_by_transformers_raises(tmp_path: Path):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers before 5.23 cannot shard them")
    model_of("qwen3_moe").save_pretrained(tmp_path)
    run_distributed(prepare_sharded, 2, tmp_path)


def test_router_penalty_of_one_layer_equals_transformers_loss():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = model_of("mixtral")
    model.model.layers = model.model.layers[:1]
    penalty = RouterPenalty(watch_routers(model), balance_weight=1.0)
    logits = model(input_ids=tokens(0, 4), output_router_logits=True).router_logits
    # transformers counts both experts of a token fully: its balanced loss is 2, and RouterPenalty is 1.
    assert 2 * penalty().item() == pytest.approx(load_balancing_loss_func(logits, EXPERTS, 2).item(), rel=1e-6)


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "hy_v3", "lfm2_moe", "flint", "cohere2_moe"])
def test_router_penalty_normalizes_sigmoid_scores(family: str):
    model = build(family)
    for module in model.modules():
        if hasattr(module, "expert_selection_fn"):  # cohere2_moe supports both
            module.expert_selection_fn = "sigmoid"
    penalty = RouterPenalty(watch_routers(model), balance_weight=1.0)
    ids = tokens(0, 4)
    outputs(model, ids)
    (watch,) = penalty.layers
    assert watch.routing is not None
    scores = watch.routing.logits_TE.sigmoid()
    share = scores / scores.sum(1, keepdim=True)
    expected = load_balancing_share(share, watch.last_load_E / watch.last_load_E.sum(), ids.numel(), share.shape[1])
    assert penalty().item() == pytest.approx(expected.item())


def test_has_sigmoid_scores_reads_router_weights():
    logits = torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(0))
    for is_sigmoid, scores in ((True, logits.sigmoid()), (False, logits.softmax(-1))):
        for top_k, scale in ((1, 1.0), (1, 2.5), (2, 1.0)):
            weights, ids = scores.topk(top_k)
            assert has_sigmoid_scores(logits, scale * weights, ids) is is_sigmoid
            assert has_sigmoid_scores(logits.bfloat16(), (scale * weights).bfloat16(), ids) is is_sigmoid
        normalised = weights / weights.sum(-1, keepdim=True)
        assert has_sigmoid_scores(logits, normalised, ids) is is_sigmoid
    assert has_sigmoid_scores(torch.zeros_like(logits), torch.full_like(weights, 0.5), ids) is None
    assert has_sigmoid_scores(logits[:0], weights[:0], ids[:0]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_keeps_gradients_and_routing(family: str):
    found = []
    for checkpointing in (False, True):
        model = model_of(family).train()
        penalty = RouterPenalty(watch_routers(model), balance_weight=1.0)
        if checkpointing:
            enable_checkpointing(model, use_reentrant=False)
        ids = tokens(0, 4)
        loss = model(input_ids=ids, labels=ids).loss + penalty()
        routed = [watch.routing for watch in penalty.layers]
        loss.backward()
        assert all(watch.routing is routing for watch, routing in zip(penalty.layers, routed, strict=True))
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((gradients, [watch.last_load_E.tolist() for watch in penalty.layers]))
    (expected, expected_load), (gradients, load) = found
    assert load == expected_load
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-9)


def test_watch_routers_under_reentrant_checkpointing_raises():
    model = model_of("mixtral").train()
    watch_routers(model)
    enable_checkpointing(model, use_reentrant=True)
    model.enable_input_require_grads()
    with pytest.raises(UserError, match=r"a routing without gradients.*use_reentrant.*False"):
        model(input_ids=tokens(0, 4))
