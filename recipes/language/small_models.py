"""Small transformers language models: configurations of an MoE model or its dense sibling, facts, and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import toolkit as tk
from language import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TEMPERATURE = 0.8
"""The temperature of samples, unless another one is asked for."""


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
    """Return the configuration of a small language model, in which the weights of a token's experts add up to 1.

    Args:
        architecture: MoE architecture; with 0 experts, its dense sibling, Qwen3 or Mistral.
        vocab_size: Ids that the text has.
        dim: Width of the residual stream.
        layers: Blocks, each with attention and a feed-forward.
        heads: Heads of attention; two of an even number share their keys and values.
        experts: Experts of each feed-forward; 0 makes a feed-forward as wide as `top_k` experts together.
        top_k: Experts per token.
        expert_hidden_size: Gated hidden units of an expert.
        context: The longest sequence, in tokens.

    Raises:
        UserError: `heads` do not fit into `dim`.
    """
    tk.require(dim % (2 * heads) == 0, "dim", dim, f"take a multiple of twice heads={heads}")
    from transformers import MistralConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

    dense, mixture = {"qwen3_moe": (Qwen3Config, Qwen3MoeConfig), "mixtral": (MistralConfig, MixtralConfig)}[
        architecture
    ]

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
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
        return dense(**common, sliding_window=None, intermediate_size=top_k * expert_hidden_size)
    common["num_experts_per_tok"] = top_k
    if architecture == "mixtral":
        return mixture(**common, intermediate_size=expert_hidden_size, num_local_experts=experts)
    return mixture(
        **common,
        intermediate_size=top_k * expert_hidden_size,
        moe_intermediate_size=expert_hidden_size,
        num_experts=experts,
        norm_topk_prob=True,
    )


def describe_language_model(model: nn.Module) -> dict[str, Any]:
    """Return facts for a run's record. `active_parameters` are those that one token uses. Call it before sharding."""
    config: Any = model.config
    inactive = 0.0
    for experts in tk.transformers.experts_modules(model).values():
        rows = sum(p.numel() for p in experts.parameters(recurse=False))
        inactive += rows * (1 - config.num_experts_per_tok / int(experts.num_experts))  # type: ignore[arg-type]
    total = sum(p.numel() for p in model.parameters())
    return {"model_type": config.model_type, "parameters": total, "active_parameters": total - round(inactive)}


@torch.no_grad()
def sample_tokens(
    model: nn.Module,
    prompts: Tensor,
    *,
    length: int,
    temperature: float = TEMPERATURE,
    seed: int = 0,
) -> Tensor:
    """Return `prompts` and their continuation by `model`. A collective.

    All ranks draw, and use the draw of rank 0. In transformers' `generate`, each rank uses its own draw: ranks could
    diverge by a rounding error, and forward passes of sharded experts are collectives.

    Args:
        model: A causal language model, whose experts can be sharded.
        prompts: int64 (B, T), the same on all ranks.
        length: Tokens to add to each.
        temperature: Divisor of the logits.
        seed: Seed of the draws.

    Returns:
        int64 (B, T + length).
    """
    was_training = model.training
    model.eval()
    draws, device = tk.generator(seed, "samples"), next(model.parameters()).device
    text = prompts.to(device)
    fresh, cache = text, dict[str, Any]()
    for _ in range(length):
        output: Any = model(input_ids=fresh, use_cache=True, **cache)
        name = "cache" if "cache" in output else "past_key_values"  # since transformers 5.24, and before
        cache = {name: output[name]}
        logits = output.logits[:, -1].float().cpu() / temperature
        fresh = torch.multinomial(logits.softmax(-1), 1, generator=draws).to(device)
        if dist.is_initialized():
            dist.broadcast(fresh, src=0)
        text = torch.cat([text, fresh], dim=1)
    model.train(was_training)
    return text
