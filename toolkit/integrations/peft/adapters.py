"""LoRA adapters of a transformers model: target matrices are found by structure."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.errors import require
from toolkit.experts.parallel.seeding import derive_seed
from toolkit.experts.sharding.find import experts_modules, routers
from toolkit.experts.sharding.libraries import library_of
from toolkit.experts.sharding.parameter_groups import parameter_groups
from toolkit.integrations.peft.adapter_options import AdapterOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, options: AdapterOptions, *, seed: int = 0) -> nn.Module:
    """Add LoRA adapters to stacked expert matrices and attention's linear layers, and freeze the rest.

    Call it before experts are sharded and routers watched. A trained router is saved with the adapters.

    Args:
        model: Adapted in place.
        options: Which adapters to add; with `lora_rank` 0 none, and `model` itself is trained.
        seed: Seed of the adapters' initial values.

    Returns:
        A PEFT model; or `model`, with rank 0.

    Raises:
        UserError: The model has no attention or no experts that the options would adapt.

    Example:
        >>> model = add_adapters(causal_lm(folder), AdapterOptions(lora_rank=16, lora_attention=False))
    """
    if options.lora_rank == 0:
        if options.freeze_router:
            parameter_groups(model, freeze="router")
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    attention = _attention_layers(model) if options.lora_attention else []
    experts = _expert_matrices(model) if options.lora_experts else []
    for name, is_asked, found in (
        ("lora_attention", options.lora_attention, attention),
        ("lora_experts", options.lora_experts, experts),
    ):
        require(
            not is_asked or bool(found), name, True, f"{type(model).__name__} has nothing to adapt there: take False"
        )
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]
        target_modules=attention,
        target_parameters=experts or None,
        modules_to_save=None if options.freeze_router else _router_modules(model),
        task_type=TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # which PEFT 0.21 asks for
        torch.manual_seed(derive_seed(seed, "adapters"))
        return get_peft_model(model, config)


def _attention_layers(model: nn.Module) -> list[str]:
    """Return the names, from the attention's own on, of the linear layers of attention."""
    found = [
        f"{_in_layer(name)}.{child}"
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention")
        for child, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    return list(dict.fromkeys(found))


def _expert_matrices(model: nn.Module) -> list[str]:
    """Return the names, from the layer on, of the stacked matrices of experts."""
    found = [
        f"{_in_layer(name)}.{matrix}"
        for name, module in experts_modules(model).items()
        for matrix in library_of(module).projections(module)
    ]
    return list(dict.fromkeys(found))


def _router_modules(model: nn.Module) -> list[str]:
    found: dict[int, Any] = {id(module): name for name, module in model.named_modules()}
    return list(dict.fromkeys(_in_layer(found[id(router)]) for router in routers(model).values()))


def _in_layer(name: str) -> str:
    """Return the part of a name behind the number of its layer: `mlp.experts` of `model.layers.3.mlp.experts`."""
    return re.split(r"(?:^|\.)\d+\.", name)[-1]
