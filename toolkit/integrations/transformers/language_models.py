"""Causal language models of transformers, from a configuration or from files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import UserError
from toolkit.experts.layer.recompute import replay_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def read_config(folder: str) -> PreTrainedConfig:
    """Return the configuration of the model in `folder`."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


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
        source: A configuration, for random weights from torch's generator: seed it alike on all ranks. Or a folder, or
            the name of a model in the Hub's cache. `toolkit.data.hub.model_folder` downloads.
        dtype: Type of its parameters.
        vocab_size: Size of the tokenizer's vocabulary, compared with the model's. None skips the check.
        experts_implementation: eager, batched_mm, grouped_mm, or `use_toolkit_kernel()`. Default: transformers' choice.
        **options: Further options of transformers. Code in the folder runs with `trust_remote_code=True` only.

    Raises:
        UserError: The tokenizer has more ids than the model.

    Example:
        >>> model = causal_lm("Qwen/Qwen3-30B-A3B", dtype=torch.bfloat16)
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    options = {"trust_remote_code": False, "dtype": dtype} | options
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    if isinstance(source, PreTrainedConfig):
        return AutoModelForCausalLM.from_config(source, **options)
    model = AutoModelForCausalLM.from_pretrained(os.fspath(source), local_files_only=True, **options)
    if vocab_size is not None and model.config.vocab_size < vocab_size:
        raise UserError(
            f"model: {source} has {model.config.vocab_size} ids and the tokenizer {vocab_size}. Use the tokenizer that "
            "it was trained with."
        )
    return model


def recompute_blocks(model: PreTrainedModel) -> None:
    """Turn on activation checkpointing of each block of `model`, with the routing of the first forward pass."""
    # The latter is the name before transformers 5.24.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": replay_contexts})
