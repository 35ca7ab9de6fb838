"""A model with adapters, merged and saved as ordinary transformers weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.experts.layer.stack import ExpertLayer
from toolkit.experts.state.state_dict import Gatherer
from toolkit.integrations.transformers.pretrained_files import by_layer, write_pretrained
from toolkit.integrations.transformers.quantization import is_packed, is_scales, packed_rows, unpacked


@torch.no_grad()
def save_merged(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the base of `model`, a model of PEFT, with its active adapters added to its weights. A collective.

    transformers' `from_pretrained` reads the folder without PEFT. `model` is unchanged: layers are merged one at a
    time. Raises UserError on every rank if the folder cannot be written.
    """
    inner: Any = getattr(model, "module", model)
    base = inner.get_base_model()
    gather = Gatherer(inner)
    layers = _adapted_layers(base)

    def gather_merged(values: Mapping[str, Tensor], state: dict[str, Tensor]) -> None:
        for layer, names in groupby(values, key=lambda name: name.rpartition(".")[0]):
            with _merged(*layers[layer]) if layer in layers else nullcontext():
                for name in names:
                    gather(state, name, values[name])

    named = base.state_dict(keep_vars=True).items()
    values = {plain: value for name, value in named if (plain := _plain_name(base, name)) is not None}
    write_pretrained(base, folder, by_layer(values, gather, gather_merged))


def _adapted_layers(base: nn.Module) -> Mapping[str, tuple[nn.Module, list[Any]]]:
    """Return layers with adapters or packed rows, by their name without adapters, and their wrappers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[str, tuple[nn.Module, list[Any]]] = {}
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            plain = name.replace(".base_layer", "")
            found.setdefault(plain, (module.get_base_layer(), []))[1].append(module)
        elif packed_rows(module):
            found.setdefault(name.replace(".base_layer", ""), (module, []))
    return found


def _plain_name(base: nn.Module, name: str) -> str | None:
    """Return the name in a model without adapters, or None if it has no such tensor."""
    parent, _, _ = name.partition(".original_module.")
    if parent != name:
        wrapper: Any = base.get_submodule(parent)
        used = any(adapter in wrapper.modules_to_save for adapter in wrapper.active_adapters)
        return None if used else name.replace(".original_module.", ".")
    if saved := re.fullmatch(r"(.*)\.modules_to_save\.([^.]+)\.(.*)", name):
        wrapper = base.get_submodule(saved[1])
        return f"{saved[1]}.{saved[3]}" if saved[2] in wrapper.active_adapters else None
    if re.search(r"\.lora_\w+\.", name) or is_scales(base, name):
        return None
    return name.replace(".base_layer", "")


@contextmanager
def _merged(layer: nn.Module, wrappers: list[Any]) -> Iterator[None]:
    """Have PEFT add the active adapters to the weights of `layer`, temporarily and without rounding."""
    stack = layer.expert_stack if isinstance(layer, ExpertLayer) else None
    before = [(name, parameter, parameter.data) for name, parameter in layer.named_parameters(recurse=False)]
    merged = [list(wrapper.merged_adapters) for wrapper in wrappers]
    try:
        for name, parameter, data in before:
            device = data.device if stack is None else stack.device
            parameter.data = unpacked(layer, name, device) if is_packed(layer, name) else data.to(device, copy=True)
        for wrapper in wrappers:
            if not wrapper.merged:
                wrapper.merge()
        yield
    finally:
        for wrapper, adapters in zip(wrappers, merged, strict=True):
            wrapper.merged_adapters[:] = adapters
        for _, parameter, data in before:
            parameter.data = data
