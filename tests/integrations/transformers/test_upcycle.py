"""Upcycled models start with the loss of the dense model."""

from typing import Any

import pytest
import torch

from benchmarks.support.families import VOCAB, tokens
from toolkit.errors import UserError
from toolkit.integrations.transformers import causal_lm, experts_modules, upcycle


def dense(kind: str, **more: Any) -> Any:
    from transformers import LlamaConfig, MistralConfig, Qwen3Config

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    config = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen3": Qwen3Config}[kind]
    torch.manual_seed(0)
    return causal_lm(config(**sizes, num_attention_heads=2, num_key_value_heads=1, **more), dtype=torch.float64)


def loss(model: Any) -> float:
    ids = tokens(0, 4)
    if experts_modules(model):
        model.set_experts_implementation("batched_mm")  # grouped_mm does not support float64
    return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize(("top_k", "shards"), [(2, 1), (4, 2)])
def test_upcycle_first_loss_equals_dense_loss(kind: str, top_k: int, shards: int):
    model = dense(kind)
    sparse = upcycle(model, num_experts=8, top_k=top_k, shards=shards)
    assert loss(sparse) == pytest.approx(loss(model), rel=1e-12)
    widths = {experts.down_proj.shape for experts in experts_modules(sparse).values()}
    assert widths == {(8, 16, 24 // shards)}


def test_upcycle_keeps_tied_embeddings():
    sparse = upcycle(dense("qwen3", tie_word_embeddings=True), num_experts=4, top_k=2)
    assert sparse.lm_head.weight is sparse.model.embed_tokens.weight


def test_upcycle_with_redraw_changes_redrawn_units_only():
    sparse = upcycle(dense("qwen3"), num_experts=4, top_k=2, redraw=0.5)
    down = next(iter(experts_modules(sparse).values())).down_proj
    original = upcycle(dense("qwen3"), num_experts=4, top_k=2)
    untouched = (down == next(iter(experts_modules(original).values())).down_proj).all(dim=1)
    assert untouched.sum(dim=1).tolist() == [12] * 4
    assert not torch.equal(down[0], down[1])


def test_upcycle_of_unsupported_model_raises():
    for model, shards, message in (
        (dense("llama", mlp_bias=True), 1, "mlp.gate_proj.bias"),
        (dense("qwen3"), 4, "shards: 4"),
        (upcycle(dense("llama"), num_experts=4, top_k=2), 1, "'mixtral' cannot be upcycled"),
    ):
        with pytest.raises(UserError, match=message):
            upcycle(model, num_experts=4, top_k=2, shards=shards)
