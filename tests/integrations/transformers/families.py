"""The four families of transformers that the tests are run with, as small as they get."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
EXPERTS, VOCAB = 8, 64


def config(family: str) -> Any:
    """Two layers, eight experts, two per token; DeepSeek-V3's first layer is dense and its groups are two."""
    from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    if family == "mixtral":
        return MixtralConfig(**common, head_dim=8, intermediate_size=24, num_local_experts=EXPERTS)
    if family == "qwen3_moe":
        sizes = {"head_dim": 8, "intermediate_size": 32, "moe_intermediate_size": 24, "norm_topk_prob": True}
        return Qwen3MoeConfig(**common, **sizes, num_experts=EXPERTS)
    if family == "deepseek_v3":
        sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
        mixture = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
        dense = {"first_k_dense_replace": 1, "intermediate_size": 32, "moe_intermediate_size": 24}
        return DeepseekV3Config(**common, **sizes, **mixture, **dense)
    return GptOssConfig(**common, head_dim=8, intermediate_size=24, num_local_experts=EXPERTS, sliding_window=8)


def awaken(model: nn.Module) -> nn.Module:
    """Give routers and biases that start at zero values, so that experts differ in load and every weight matters."""
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router." in name or ".gate.weight" in name or name.endswith("_bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float32) * 0.3)
    return model


def tokens(step: int, samples: int) -> Tensor:
    """int64 (samples, 12): the global batch of a step."""
    return torch.randint(3, VOCAB, (samples, 12), generator=torch.Generator().manual_seed(100 + step))
