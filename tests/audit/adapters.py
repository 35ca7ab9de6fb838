"""Adapters of small models as PEFT saves them, and copies with other tensors or settings."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.integrations.peft.models import config
from toolkit.integrations.transformers import causal_lm

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
TARGETS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
Tensors = dict[str, Tensor]


def save_adapter(folder: Path, family: str, **settings: Any) -> Any:
    """Save a base and random float64 adapters of it, and return the model of PEFT."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = causal_lm(config(family)).double()
    base.save_pretrained(folder / "base")
    usual: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": list(TARGETS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for what PEFT asks
        warnings.filterwarnings("ignore", "The following rank_pattern keys")  # PEFT 0.21 uses them all the same
        model: Any = get_peft_model(base, LoraConfig(**usual | settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    model.save_pretrained(folder / "peft")
    return model


def changed(folder: Path, target: Path, edit: Callable[[Tensors], object] | None = None, **settings: Any) -> Path:
    """Copy an adapter with other tensors or settings."""
    shutil.copytree(folder, target)
    (target / SETTINGS).write_text(json.dumps(json.loads((folder / SETTINGS).read_text()) | settings))
    if edit:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, target / WEIGHTS)
    return target
