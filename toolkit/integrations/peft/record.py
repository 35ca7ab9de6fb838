"""The ranks' record of adapters at saving, which `save_pretrained` writes next to them for `toolkit audit`."""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.collectives import gather_objects, is_main
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.integrations.peft.layouts import RECORD


@torch.no_grad()
def describe_adapters(model: Any) -> dict[str, dict[str, Any]]:
    """Return for each adapter: norms of experts' rows, scalings, parameters that differ between ranks, and trained
    parameters of the base. Warns of the latter, as no adapter file has them.

    Parameters are named as if the adapter were loaded as `default`. A collective.
    """
    from peft.tuners.lora.layer import LoraLayer

    found: dict[str, dict[str, Any]] = {}
    num_experts = {
        id(parameter): stack.num_experts
        for stack in expert_stacks(model).values()
        for parameter in stack.parameters.values()
    }
    trained = _trained_of_base(model)
    if trained and is_main():
        warnings.warn(
            f"{len(trained)} parameter(s) of the base are trained, such as {trained[0]}, and are not saved with the "
            "adapters: write the full model with save_merged of toolkit.integrations.peft.merged_weights.",
            stacklevel=2,
        )
    for adapter in model.peft_config:
        norms, checks = {}, {}
        for name, parameter in model.named_parameters():
            plain = name.replace(f".{adapter}.", ".default.")
            if "lora_" not in name or f".{adapter}." not in name:
                continue
            if id(parameter) in num_experts:
                norms[plain] = _norms(parameter, num_experts[id(parameter)]).tolist()
            elif not isinstance(parameter, DTensor):
                checks[plain] = zlib.crc32(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
        found[adapter] = {
            "norms": norms,
            "scaling": {name: layer.scaling[adapter] for name, layer in layers if adapter in layer.scaling},
            "differ": _differing(checks),
            "trained_of_base": trained,
        }
    return found


def _trained_of_base(model: Any) -> list[str]:
    """Return the names of trained parameters that PEFT's files do not have."""
    saved = ["lora_", ".modules_to_save.", ".trainable_tokens_"]
    if any(config.bias != "none" for config in model.peft_config.values()):
        saved.append(".bias")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [name for name in names if not any(part in name for part in saved)]


def _differing(checks: dict[str, int]) -> list[str]:
    """Return names with different values on ranks. A collective."""
    everyones = gather_objects(checks)
    return sorted(name for name, value in checks.items() if any(rank[name] != value for rank in everyones))


def _norms(parameter: Tensor, num_experts: int) -> Tensor:
    """Return norms (E,) of experts' rows, from their owners."""
    ownership = ownership_of(parameter)
    assert ownership is not None
    norms_E = parameter.new_zeros(num_experts)
    for row, expert in enumerate(ownership.row_ids):
        if ownership.owns[row]:
            norms_E[expert] = parameter[row].norm()
    if ownership.groups.ep_group is not None:
        dist.all_reduce(norms_E, group=ownership.groups.ep_group)
    return norms_E.double()


def write_records(records: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write `records` next to each adapter, as PEFT saves it: `default` in `folder`, others below it."""
    for adapter, record in records.items():
        place = folder if adapter == "default" else folder / adapter
        (place / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
