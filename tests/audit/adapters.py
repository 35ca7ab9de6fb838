"""Adapters of small models as PEFT saves them, and edited copies."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.support.families import EXPERTS, model_of
from tests.integrations.peft.models import MATRICES, add_adapters

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
Tensors = dict[str, Tensor]
Edit = Callable[[Tensors], object]


def save_adapter(folder: Path, family: str, model: Any = None, **settings: Any) -> Any:
    """Save a base, by default of the `family`, and random float64 adapters of it, and return the PEFT model."""
    base = (model or model_of(family)).double()
    base.save_pretrained(folder / "base", max_shard_size="99KB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised by transformers for a call of PEFT
        warnings.filterwarnings("ignore", "The following rank_pattern keys")  # PEFT 0.21 applies them nevertheless
        model = add_adapters(base, **{"r": 4, "lora_alpha": 8, "target_parameters": MATRICES} | settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
        if (
            ".experts." in name and "lora_A" in name
        ):  # the columns of an expert are alike, also where A and B are swapped
            rank = len(parameter) // EXPERTS
            parameter.data += torch.randn(EXPERTS, parameter.shape[1]).repeat_interleave(rank, 0)
        elif ".experts." in name and "lora_B" in name:
            parameter.data += torch.randn(len(parameter), EXPERTS).repeat(1, parameter.shape[1] // EXPERTS)
    model.save_pretrained(folder / "peft")
    return model


def changed(folder: Path, target: Path, *edits: Edit, **settings: Any) -> Path:
    """Copy an adapter with edited tensors and settings."""
    shutil.copytree(folder, target)
    (target / SETTINGS).write_text(json.dumps(json.loads((folder / SETTINGS).read_text()) | settings))
    tensors = load_file(folder / WEIGHTS)
    for edit in edits:
        edit(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / WEIGHTS)
    return target


def replace(*parts: str, by: Callable[[Tensor], Tensor | None]) -> Edit:
    """Return an edit that replaces tensors whose names contain `parts` by `by(tensor)`, or deletes them if None."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if all(part in name for part in parts)]:
            value = by(tensors.pop(name))
            if value is not None:
                tensors[name] = value.clone()

    return edit


def delete(*parts: str) -> Edit:
    return replace(*parts, by=lambda _: None)


def rename(old: str, new: str) -> Edit:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def swap_sides(tensors: Tensors) -> None:
    """Write adapters of experts as PEFT before 0.19.1 does: of transposed matrices, with 8 experts."""
    for key in [key for key in tensors if "experts" in key and "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        a, b = tensors[key], tensors[other]
        tensors[key] = b.view(len(b), -1, EXPERTS).permute(2, 1, 0).flatten(0, 1)
        tensors[other] = a.view(EXPERTS, -1, a.shape[1]).permute(2, 1, 0).flatten(1)


def order_by_expert(tensors: Tensors) -> None:
    """Write `lora_B` of experts as Unsloth before September 2026 does, with 8 experts."""
    replace("experts", "lora_B", by=lambda b: b.view(len(b), -1, EXPERTS).mT.flatten(1))(tensors)


def share(tensors: Tensors) -> None:
    """Let all experts share the outer matrices, as Megatron-Bridge writes them for SGLang."""
    for name in [name for name in tensors if "gate_up_proj.lora_A" in name or "down_proj.lora_B" in name]:
        tensors[name] = tensors[name][:1].clone()
