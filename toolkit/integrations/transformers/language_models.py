"""Causal language models of transformers, by configuration or saved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import UserError, one_line
from toolkit.experts.layer.recompute import replay_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def read_config(folder: str) -> PreTrainedConfig:
    """Return the configuration of the model in `folder`. Raises UserError where transformers does not know it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _not_built(folder, error) from error


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
    except UserError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise _not_built(name, error) from error
    if vocab_size is not None and model.config.vocab_size < vocab_size:
        raise UserError(
            f"model {source} knows {model.config.vocab_size} ids and the tokenizer has {vocab_size}: "
            "use the tokenizer that it was trained with."
        )
    return model


def recompute_blocks(model: PreTrainedModel) -> None:
    """Have each block of `model` compute again in the backward, in place of keeping what it computed."""
    # The latter is the name before transformers 5.24.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": replay_contexts})


def _not_built(name: str, error: Exception) -> UserError:
    return UserError(
        f"model {name} cannot be built ({one_line(error)}): use a causal language model that transformers knows, "
        "in a folder or in the Hub's cache."
    )
