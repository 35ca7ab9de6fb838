"""Configurations of small language models: a mixture of experts, or the dense model of the same architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from toolkit.errors import require, require_choice
from toolkit.experts.hosts.transformers.anatomy import experts_modules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Architecture = Literal["qwen3_moe", "mixtral"]


def language_model_config(
    architecture: Architecture,
    *,
    vocab_size: int,
    dim: int,
    layers: int,
    heads: int,
    experts: int,
    top_k: int,
    expert_hidden_size: int,
    context: int,
) -> PreTrainedConfig:
    """Every layer's feed-forward is a mixture of `experts`, each of `expert_hidden_size` gated hidden units.

    With 0 experts the dense sibling (Qwen3, Mistral) whose feed-forward is as wide as `top_k` experts together.
    A token's weights add up to 1; two heads share their keys and values. `context` is the longest sequence, in tokens.
    Raises UserError for sizes that do not fit, and for another architecture.
    """
    require_choice("architecture", architecture, Architecture)
    for name, value in (("dim", dim), ("layers", layers), ("heads", heads)):
        require(value >= 1, name, value, "take one or more")
    require(dim % (2 * heads) == 0, "dim", dim, f"take a multiple of twice heads={heads}")
    require(heads == 1 or heads % 2 == 0, "heads", heads, "take 1 or an even number")
    from transformers import MistralConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": dim // heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        # The usual 0.02 suits a width of 2,500: in small models the outputs of experts would be close to 0 at first.
        "initializer_range": dim**-0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": False,
    }
    if experts == 0:
        dense = {"qwen3_moe": Qwen3Config, "mixtral": MistralConfig}[architecture]
        window = {"sliding_window": None} if architecture == "mixtral" else {}
        return dense(**common, **window, intermediate_size=top_k * expert_hidden_size)
    common["num_experts_per_tok"] = top_k
    if architecture == "mixtral":
        return MixtralConfig(**common, intermediate_size=expert_hidden_size, num_local_experts=experts)
    return Qwen3MoeConfig(
        **common,
        intermediate_size=top_k * expert_hidden_size,
        moe_intermediate_size=expert_hidden_size,
        num_experts=experts,
        norm_topk_prob=True,
    )


def describe_language_model(model: nn.Module) -> dict[str, Any]:
    """Facts for a run's record. `active_parameters` are those that one token uses. Call it before sharding."""
    config: Any = model.config
    inactive = 0.0
    for experts in experts_modules(model).values():
        rows = sum(p.numel() for p in experts.parameters(recurse=False))
        inactive += rows * (1 - config.num_experts_per_tok / int(experts.num_experts))  # type: ignore[arg-type]
    total = sum(p.numel() for p in model.parameters())
    return {"model_type": config.model_type, "parameters": total, "active_parameters": total - round(inactive)}
