"""Language models of transformers: configurations of small ones, models by configuration or saved, and their samples.

A configuration is of a mixture of experts, or of the dense model of the same architecture.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import UserError, one_line, require_choice, require_count
from toolkit.experts.hosts.spreading.foreign import experts_modules
from toolkit.experts.parallel.seeding import generator

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Architecture = Literal["qwen3_moe", "mixtral"]
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
        architecture: The mixture's; with 0 experts its dense sibling is taken, Qwen3 or Mistral.
        vocab_size: Ids that the text has.
        dim: Width of the residual stream.
        layers: Blocks, each with attention and a feed-forward.
        heads: Heads of attention; two of them share their keys and values.
        experts: Experts of each feed-forward; 0 makes a feed-forward as wide as `top_k` experts together.
        top_k: Experts per token.
        expert_hidden_size: Gated hidden units of an expert.
        context: The longest sequence, in tokens.

    Raises:
        UserError: Sizes do not fit, or the architecture is another one.
    """
    require_choice("architecture", architecture, Architecture)
    for name, value in (("dim", dim), ("layers", layers), ("heads", heads)):
        require_count(name, value)
    if dim % (2 * heads):
        raise UserError(f"dim={dim}: take a multiple of twice heads={heads}.")
    if heads > 1 and heads % 2:
        raise UserError(f"heads={heads}: take 1 or an even number.")
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


def causal_lm(
    source: str | os.PathLike[str] | PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    experts_implementation: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return a causal language model of transformers.

    Args:
        source: A configuration, for random weights from torch's generator, so seed it alike on all ranks. Or a folder,
            or the name of a model in the Hub's cache, for its weights: nothing is downloaded here, but by
            `toolkit.data.hub.model_folder`.
        dtype: The type of its parameters.
        vocab_size: How many ids the text has, which must not be more than the model knows; None compares nothing.
        experts_implementation: eager, batched_mm or grouped_mm; None leaves the choice to transformers.
        **options: What transformers takes besides.

    Raises:
        UserError: `source` cannot be found or understood, or the text has more ids than the model.
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    options |= {"dtype": dtype}
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    given = isinstance(source, PreTrainedConfig)
    name = f"a {type(source).__name__}" if given else str(source)
    try:
        if given:
            return AutoModelForCausalLM.from_config(source, **options)
        model = AutoModelForCausalLM.from_pretrained(os.fspath(source), local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model {name} cannot be built ({one_line(error)}): use a causal language model that transformers knows, "
            "in a folder or in the Hub's cache."
        ) from error
    if vocab_size is not None and model.config.vocab_size < vocab_size:
        raise UserError(
            f"model {source} knows {model.config.vocab_size} ids and the tokenizer has {vocab_size}: "
            "use the tokenizer that it was trained with."
        )
    return model


def describe_language_model(model: nn.Module) -> dict[str, Any]:
    """Return facts for a run's record. `active_parameters` are those that one token uses. Call it before sharding."""
    config: Any = model.config
    inactive = 0.0
    for experts in experts_modules(model).values():
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
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Return `prompts` and the text with which `model` continues them. A collective.

    All ranks draw, and take what rank 0 drew. It is not transformers' `generate`, in which each rank goes on with its
    own draw: a difference in the last digit would send ranks different ways, and forwards of experts that are spread
    have to go together.

    Args:
        model: A causal language model, whose experts may be spread over ranks.
        prompts: int64 (B, T), the same on all ranks.
        length: Tokens to add to each.
        temperature: What logits are divided by.
        top_k: How many of the likeliest tokens one is drawn from; None takes all.
        seed: What the draws depend on, alone.

    Returns:
        int64 (B, T + length).
    """
    was_training = model.training
    model.eval()
    draws, device = generator(seed, "samples"), next(model.parameters()).device
    text = prompts.to(device)
    fresh, cache = text, None
    for _ in range(length):
        output: Any = model(input_ids=fresh, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[:, -1].float().cpu() / temperature
        if top_k is not None:
            logits[logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]] = -torch.inf
        fresh = torch.multinomial(logits.softmax(-1), 1, generator=draws).to(device)
        if dist.is_initialized():
            dist.broadcast(fresh, src=0)
        text = torch.cat([text, fresh], dim=1)
    model.train(was_training)
    return text
