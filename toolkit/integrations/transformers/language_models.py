"""Causal language models of transformers, from a configuration or from files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from toolkit.errors import UserError, reading
from toolkit.experts.layer.recompute import replay_contexts
from toolkit.integrations.transformers.compat import require_few_layers, weights_loaded_by

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

AGAIN = "Download or copy the model again."


def read_config(folder: str) -> PreTrainedConfig:
    """Return the configuration of the model in `folder`."""
    from transformers import AutoConfig, PreTrainedConfig

    with reading(folder, AGAIN):
        require_few_layers(PreTrainedConfig.get_config_dict(folder, local_files_only=True)[0])
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
        UserError: The tokenizer has more ids than the model; files lack a weight, or have integers for one.

    Example:
        >>> model = causal_lm("Qwen/Qwen3-30B-A3B", dtype=torch.bfloat16)
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    options = {"trust_remote_code": False, "dtype": dtype} | options
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    if isinstance(source, PreTrainedConfig):
        return AutoModelForCausalLM.from_config(source, **options)
    with reading(source, AGAIN), weights_loaded_by(_load_floating_point):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            os.fspath(source), local_files_only=True, output_loading_info=True, **options
        )
    model, info = loaded
    # Transformers draws these at random.
    if lacking := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise UserError(
            f"model: files of {source} lack {len(lacking)} weight(s) of this shape, such as {lacking[0]}. {AGAIN}"
        )
    if vocab_size is not None and model.config.vocab_size < vocab_size:
        raise UserError(
            f"model: {source} has {model.config.vocab_size} ids and the tokenizer {vocab_size}. Use the tokenizer that "
            "it was trained with."
        )
    return model


def _load_floating_point(
    load: Callable[..., Any], model: Any, state: Any, files: Sequence[str] | None, config: Any, *rest: Any
) -> Any:
    """Load a model, which transformers does by `load`; it would cast integers to the type of the weights."""
    for file in files or () if config.hf_quantizer is None else ():
        if file.endswith(".safetensors"):
            with reading(file, AGAIN), safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    require_floating_point(name, opened.get_slice(name), file)
    return load(model, state, files, config, *rest)


def require_floating_point(name: str, piece: Any, file: str) -> None:
    """Raise UserError if `piece`, the slice `name` of a safetensors file, is a matrix of integers."""
    if piece.get_dtype().startswith(("I", "U", "BOOL")) and len(piece.get_shape()) > 1:
        raise UserError(
            f"model: {name} in {file} has type {piece.get_dtype()}, and config.json has no quantization_config. Save "
            "the model in floating point."
        )


def recompute_blocks(model: PreTrainedModel) -> None:
    """Turn on activation checkpointing of each block of `model`, with the routing of the first forward pass."""
    # The latter is the name before transformers 5.24.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": replay_contexts})


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide progress bars of transformers, within long work that has its own."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
