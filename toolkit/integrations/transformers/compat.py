"""Private names of transformers that the toolkit relies on, each behind one function.

`tests/test_compat.py` tests the behaviour that each function relies on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_LAYERS = 1000
"""Larger claims of a `config.json` are mistakes."""


@contextmanager
def weights_loaded_by(load: Callable[..., Any]) -> Iterator[None]:
    """Have `from_pretrained` call `load(theirs, model, state_dict, checkpoint_files, load_config, ...)` with a model on
    the meta device; `theirs` is the original function, which takes the other arguments."""
    from transformers import PreTrainedModel

    theirs = vars(PreTrainedModel)["_load_pretrained_model"]
    ours = staticmethod(functools.partial(load, theirs.__func__))
    PreTrainedModel._load_pretrained_model = ours  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = theirs  # type: ignore[method-assign]


def mark_as_loaded(parameter: Tensor) -> None:
    """Have transformers keep a parameter that no file has."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def experts_implementation(config: Any) -> str | None:
    """Return the `experts_implementation` that a model was made with."""
    return getattr(config, "_experts_implementation", None)


def register_experts_function(name: str, forward: Callable[..., Tensor]) -> None:
    """Make `experts_implementation=name` call `forward(experts, hidden_TD, ids_TK, weights_TK)`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, forward)


def apply_gate(experts: Any, hidden_ND: Tensor) -> Tensor:
    """Apply the activation and the gate, if any, of an experts module, between its two matrix products."""
    return experts._apply_gate(hidden_ND)


def has_default_gate(experts: Any) -> bool:
    """Whether `apply_gate` is `act_fn(gate) * up`, with the gate in the first half of the columns."""
    from transformers.integrations.moe import _default_apply_gate

    return type(experts)._apply_gate is _default_apply_gate


def names_of_stacked_experts(model_type: str) -> list[tuple[str, str]]:
    """Return the tensors of files in which a family has all experts of a layer, as a pattern and transformers' name."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return [
        (source.removeprefix("\\").removeprefix("."), target.removeprefix("."))
        for each in get_checkpoint_conversion_mapping(model_type) or ()
        for source in each.source_patterns
        for target in each.target_patterns
        if ".experts." in target and "*" not in source and "(" not in source
    ]


def names_of_separate_experts(model_type: str) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Return how a family's files name experts that they have one by one.

    Returns:
        Parts of modules' names in files and in the model, such as (".block_sparse_moe.", ".mlp."); and by stacked
        parameter the linear layers of each expert, such as {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]}.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    modules, linears = [], {}
    for each in get_checkpoint_conversion_mapping(model_type) or ():
        source, target = each.source_patterns, each.target_patterns[0]
        if ".experts.*." in source[0] or source[0].startswith("experts.*."):
            linears[target.rpartition(".")[2]] = [part.split("*.")[1].removesuffix(".weight") for part in source]
        elif re.fullmatch(r"\.\w+\.", source[0]) and re.fullmatch(r"\.\w+\.", target):
            modules.append((source[0], target))
    return modules, linears


def renaming_of_files(model_type: str) -> Callable[[str], str]:
    """Return a function from the name of a tensor in a family's files to its name in the model.

    Tensors that the model joins, splits or transposes keep their names.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    changes = get_checkpoint_conversion_mapping(model_type) or ()
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    return lambda name: rename_source_key(name, renamings, [])[0]


def log_images(callback: Any, images: Mapping[str, Path], step: int) -> None:
    """Log image files by name if `callback` is transformers' callback of W&B or TensorBoard while it logs."""
    wandb: Any = getattr(callback, "_wandb", None)
    writer: Any = getattr(callback, "tb_writer", None)
    if wandb is not None and wandb.run is not None:
        files = {f"train/{name}": wandb.Image(str(path)) for name, path in images.items()}
        wandb.log({**files, "train/global_step": step})
    if writer:
        from toolkit.run.tracking.trackers import pixels

        for name, path in images.items():
            writer.add_image(f"train/{name}", pixels(path), step, dataformats="HWC")


def tensors_in_files(
    config: Mapping[str, Any], counts: Iterable[str]
) -> tuple[str, dict[str, tuple[int, ...]], Callable[[str], str]]:
    """Return the tensors that transformers' own model of a `config.json` has in files, without code of the folder.

    Args:
        config: The value in `config.json`.
        counts: Fields of which MoE families have one; other families may download a backbone.

    Returns:
        The model's class, its tensors' shapes by name, and a function from a name in files, also of an older format, to
        the parameter.

    Raises:
        Exception: transformers has no such model, or a setting is wrong.
    """
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture, *_ = config.get("architectures") or [""]
    family: Any = CONFIG_MAPPING[config["model_type"]]
    fields = {
        name for each in (family, *family.sub_configs.values()) for name in getattr(each, "__dataclass_fields__", ())
    }
    if not fields & {*counts}:
        raise ValueError(f"{config['model_type']} is no MoE family")
    settings = family.from_dict(_without_code(config), attn_implementation="eager")
    kind: Any = getattr(transformers, architecture, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    with torch.device("meta"):
        model = kind(settings)
    parameters = remove_tied_weights_from_state_dict(model.state_dict(), model)
    changes = get_model_conversion_mapping(model)
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters: list[Any] = [each for each in changes if not isinstance(each, WeightRenaming)]

    def parameter_of(name: str) -> str:
        return rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)[0]

    in_files = revert_weight_conversion(model, parameters)
    return kind.__name__, {name: tuple(value.shape) for name, value in in_files.items()}, parameter_of


def require_few_layers(config: Any) -> None:
    """Raise ValueError if a `config.json` claims many layers or labels, which transformers would make one by one."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if isinstance(value, int) and value > MOST_LAYERS and re.search("layers|depth|blocks|labels", key):
            raise ValueError(f"{key} is larger than {MOST_LAYERS:,}")
        require_few_layers(value)


def _without_code(config: Any) -> Any:
    """Return a `config.json` without settings that make transformers load code or quantize."""
    if not isinstance(config, Mapping):
        return [_without_code(value) for value in config] if isinstance(config, list) else config
    if "__float__" in config:  # how transformers writes infinity
        return float(config["__float__"])
    left_out = "auto_map", "attn_implementation", "experts_implementation", "quantization_config"
    return {
        key: _without_code(value) for key, value in config.items() if key not in left_out and not key.startswith("_")
    }
