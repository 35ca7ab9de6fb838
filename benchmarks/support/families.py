"""Small models of transformers' MoE families, with random weights."""

import importlib
import re
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.precision import in_float64
from toolkit.integrations.transformers import causal_lm

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
EXPERTS, TINY_EXPERTS, VOCAB = 8, 4, 64

FIELDS = {
    VOCAB: "vocab_size unpadded_vocab_size vocab_size_per_layer_input expert_capacity max_position_embeddings",
    TINY_EXPERTS: "num_experts num_local_experts n_routed_experts moe_num_experts hidden_size_per_layer_input "
    "qk_rope_head_dim qk_nope_head_dim",
    24: "decoder_ffn_dim encoder_ffn_dim d_ff intermediate_size intermediate_size_mlp moe_intermediate_size "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size "
    "shared_intermediate_size share_expert_dim ffn_hidden_size expert_ffn_hidden_size",
    16: "hidden_size moe_hidden_size d_model index_topk",
    8: "d_kv head_dim router_hidden_size q_lora_rank kv_lora_rank v_head_dim linear_head_dim linear_key_head_dim "
    "linear_value_head_dim index_head_dim mamba_d_state",
    2: "num_attention_heads num_key_value_heads zero_expert_num num_experts_per_tok top_k_experts moe_k moe_topk "
    "moe_top_k linear_num_heads linear_num_key_heads linear_num_value_heads index_n_heads eos_token_id",
    1: "num_hidden_layers num_layers num_decoder_layers decoder_layers encoder_layers n_shared_experts n_group "
    "topk_group expert_layer_period bos_token_id",
    0: "first_k_dense_replace num_dense_layers moe_layer_start_index expert_layer_offset pad_token_id",
}
"""Configuration fields by value."""
SIZES: dict[str, Any] = {name: value for value, names in FIELDS.items() for name in names.split()}
SIZES |= {"enable_moe_block": True, "use_cache": False, "mlp_layer_types": ["sparse"], "mlp_only_layers": []}
SIZES |= dict.fromkeys(("dropout", "dropout_rate", "encoder_layerdrop", "decoder_layerdrop"), 0.0)
SIZES |= dict.fromkeys(("moe_token_dropout", "router_jitter_noise", "attention_dropout"), 0.0)
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"mlp_layer_types": ["moe"]},
    "doge": {"is_moe": True},
    "dbrx": {
        "n_heads": 2,
        "n_layers": 1,
        "max_seq_len": VOCAB,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 24, "moe_num_experts": TINY_EXPERTS, "moe_top_k": 2},
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": ROTARY | {"mrope_section": [1, 1, 2]},
    },
    "gpt_oss": {"sliding_window": 8},
    "glm4v_moe_text": {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 0]}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "hy_v4_vl_text": {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 0]}},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 8},
    "lfm2_moe": {"layer_types": ["full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "nemotron_h": {"layers_block_type": ["attention", "moe"]},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 24},
    "step3p5": {"sliding_window": VOCAB, "layer_types": ["full_attention"]},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""Additional fields of a family."""
TWO_LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_group": 2, "norm_topk_prob": True}
TWO_LAYERS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)


def config(family: str) -> Any:
    """Return the configuration of a model with two layers and eight experts, two per token."""
    return tiny_config(family, **TWO_LAYERS)


def tiny_config(family: str, **sizes: Any) -> Any:
    """Return the configuration of a model with one layer and four experts, except for `sizes`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[family]
    known = {name: value for name, value in (SIZES | sizes).items() if name in kind.__dataclass_fields__}
    return kind(**known | OWN.get(family, {}), attn_implementation="eager")


def randomize_routers(model: nn.Module) -> nn.Module:
    """Draw routers and biases that are initialized to zero, so that expert loads differ and every weight matters."""
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router." in name or ".gate.weight" in name or name.endswith("_bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float32) * 0.3)
    return model


def model_of(family: str, **options: Any) -> Any:
    """Return a model of `config(family)`, with options of `causal_lm`."""
    torch.manual_seed(0)
    return randomize_routers(causal_lm(config(family), **options))


def tokens(step: int, samples: int) -> Tensor:
    """Return the global batch of a step, int64 (samples, 12)."""
    return torch.randint(3, VOCAB, (samples, 12), generator=torch.Generator().manual_seed(100 + step))


def moe_families() -> list[str]:
    """Return the model types with a number of experts and a vocabulary."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return [name for name in CONFIG_MAPPING if _is_moe(CONFIG_MAPPING[name])]


def _is_moe(kind: Any) -> bool:
    if "vocab_size" not in kind.__dataclass_fields__:
        return False
    parts = [part for part in kind.sub_configs.values() if hasattr(part, "__dataclass_fields__")]
    known = [kind, *(part for part in parts if not part.model_type)]
    return any(re.search(r"(^|_)(num|n)_(\w+_)?experts$", name) for each in known for name in each.__dataclass_fields__)


def _model_class(settings: Any) -> Any:
    """Return the causal language model of a configuration, or its largest model."""
    name = type(settings).__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:  # its checkpoints are loaded into the model of another family
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        return MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    models = {
        each.__name__: each
        for each in vars(module).values()
        if isinstance(each, type) and getattr(each, "config_class", None) is type(settings)
    }
    endings = ("ForCausalLM", "ForConditionalGeneration", "TextModel", "Model")
    names = (name for ending in endings for name in models if name.endswith(ending))
    return models[next(name for name in names if not name.endswith("PreTrainedModel"))]


def build(family: str, **sizes: Any) -> Any:
    """Return a model of `tiny_config(family, **sizes)`, all of whose weights are random."""
    settings = tiny_config(family, **sizes)
    settings._experts_implementation = "eager"
    torch.manual_seed(0)
    model = _model_class(settings)(settings)
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws, dtype=torch.float32)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)
    return model


def outputs(model: Any, ids: Tensor) -> Tensor:
    """Return logits, or the last hidden states of a model without a head, for int64 (samples, length)."""
    inner = getattr(model, "module", model)
    if inner.config.is_encoder_decoder:
        found = model(input_ids=ids, decoder_input_ids=ids)
    elif inner.config.model_type == "qwen3_omni_moe_talker_text":  # requires inputs_embeds
        found = model(inputs_embeds=inner.get_input_embeddings()(ids))
    else:
        found = model(input_ids=ids)
    return found.logits if "logits" in found else found.last_hidden_state


def supports_float64(family: str, ids: Tensor) -> bool:
    """Return whether the family trains in float64: some multiply by tensors that they keep in float32."""
    try:
        with in_float64():
            outputs(build(family), ids).sum().backward()
    except RuntimeError:
        return False
    return True
