"""Every mixture of experts that transformers ships, as small as it gets, with random weights and without a network.

What is a mixture is asked of the configurations: one with a number of experts. So a new release's are built, too.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from torch import Tensor, nn

EXPERTS, VOCAB = 4, 64

# Of each configuration's fields those that it has.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 16,
    "hidden_size_per_layer_input": 4,
    "moe_hidden_size": 16,
    "d_model": 16,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "decoder_layers": 1,
    "encoder_layers": 1,
    "decoder_ffn_dim": 24,
    "encoder_ffn_dim": 24,
    "d_ff": 24,
    "d_kv": 8,
    "dropout": 0.0,
    "dropout_rate": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "moe_token_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "expert_capacity": VOCAB,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "intermediate_size_mlp": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "share_expert_dim": 24,
    "ffn_hidden_size": 24,
    "expert_ffn_hidden_size": 24,
    "router_hidden_size": 8,
    "max_position_embeddings": 64,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "n_shared_experts": 1,
    "mlp_layer_types": ["sparse"],
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "enable_moe_block": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 16,
    "mamba_d_state": 8,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"mlp_layer_types": ["moe"]},
    "doge": {"is_moe": True},
    "dbrx": {
        "n_heads": 2,
        "n_layers": 1,
        "max_seq_len": VOCAB,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 24, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": ROTARY | {"mrope_section": [1, 1, 2]},
    },
    "glm4v_moe_text": {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 0]}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 8},
    "lfm2_moe": {"layer_types": ["full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "nemotron_h": {"layer_types": ["moe"]},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 24},
    "step3p5": {"sliding_window": VOCAB, "layer_types": ["full_attention"]},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides."""


IN_FLOAT32 = frozenset(("bailing_hybrid", "glm5_next_text", "hunyuan_v1_moe", "kimi_linear", "openai_privacy_filter"))
"""Families that convert some tensors to float32 and do not multiply them by float64."""


def families() -> list[str]:
    """The types of models of text that have a number of experts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return [name for name in CONFIG_MAPPING if _is_mixture(CONFIG_MAPPING[name])]


def _is_mixture(kind: Any) -> bool:
    if "vocab_size" not in kind.__dataclass_fields__:
        return False
    parts = [part for part in kind.sub_configs.values() if hasattr(part, "__dataclass_fields__")]
    known = [kind, *(part for part in parts if not part.model_type)]
    return any(re.search(r"(^|_)(num|n)_(\w+_)?experts$", name) for each in known for name in each.__dataclass_fields__)


def config(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    known = {name: value for name, value in SIZES.items() if name in kind.__dataclass_fields__}
    return kind(**known | OWN.get(family, {}))


def model_class(settings: Any) -> Any:
    """The causal language model of a configuration, or what has most of it."""
    name = type(settings).__module__.replace("configuration_", "modeling_")
    module = importlib.import_module(name)
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and getattr(each, "config_class", None) is type(settings)
    ]
    endings = ("ForCausalLM", "ForConditionalGeneration", "TextModel", "Model")
    for ending in endings:
        for each in found:
            if each.__name__.endswith(ending) and not each.__name__.endswith("PreTrainedModel"):
                return each
    raise LookupError(f"no model in {name}")


def build(family: str) -> nn.Module:
    settings = config(family)
    settings._attn_implementation = settings._experts_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(settings)(settings)
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():  # experts that differ in load, and no weight that starts at zero
            noise = torch.randn(parameter.shape, generator=draws, dtype=torch.float32)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)
    return model


def outputs(model: Any, ids: Tensor) -> Tensor:
    """Logits, or the last hidden states of a model without a head, of int64 (samples, length)."""
    inner = getattr(model, "module", model)
    if inner.config.is_encoder_decoder:
        found = model(input_ids=ids, decoder_input_ids=ids)
    elif inner.config.model_type == "qwen3_omni_moe_talker_text":  # has no embeddings of text
        found = model(inputs_embeds=inner.get_input_embeddings()(ids))
    else:
        found = model(input_ids=ids)
    return found.logits if "logits" in found else found.last_hidden_state
