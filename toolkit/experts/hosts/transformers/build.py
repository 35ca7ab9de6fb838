"""A causal language model of transformers, with random weights from a configuration or with saved ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.data.hub import pretrained_folder
from toolkit.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def causal_lm(
    source: str | os.PathLike[str] | PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    experts_implementation: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """From a configuration: random weights, from torch's generator, so seed it alike on all ranks.
    From a folder or a Hub name: its weights; what lies in the cache is not asked for again.

    `vocab_size`: how many ids the text has, which must not be more than the model knows.
    `experts_implementation`: eager, batched_mm or grouped_mm; None leaves the choice to transformers.
    `options` go to transformers. Raises UserError for what cannot be found, reached or understood.
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    options |= {"dtype": dtype}
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    if isinstance(source, PreTrainedConfig):
        try:
            return AutoModelForCausalLM.from_config(source, **options)
        except (ValueError, KeyError) as error:
            raise _refused(f"a {type(source).__name__}", error) from error
    folder = model_folder(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _refused(str(source), error) from error
    if vocab_size is not None and model.config.vocab_size < vocab_size:
        raise UserError(
            f"model {source} knows {model.config.vocab_size} ids and the tokenizer has {vocab_size}: "
            "use the tokenizer that it was trained with."
        )
    return model


def _refused(source: str, error: Exception) -> UserError:
    return UserError(
        f"model {source} cannot be built ({one_line(error)}): use a causal language model that transformers knows."
    )


def model_folder(source: str | os.PathLike[str]) -> str:
    """The folder of a model's files, downloaded where they are neither here nor in the cache. Raises UserError, within
    seconds, downloads aside, where there is none."""
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt"]
    folder = pretrained_folder("model", os.fspath(source), wanted=wanted, needed=["config.json"])
    if not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"model folder {source} has no config.json: give one that save_pretrained wrote, or a Hub name."
        )
    return folder
