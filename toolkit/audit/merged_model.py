"""A base model in safetensors files with low-rank updates of its weights, written in the layout of its files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.audit.expected import UNQUANTIZED
from toolkit.audit.experts import EXPERT, settings_of_experts
from toolkit.audit.tensors import SafetensorsFiles, open_checkpoint
from toolkit.errors import UserError
from toolkit.integrations.peft import layouts
from toolkit.integrations.transformers.compat import renaming_of_files
from toolkit.progress_bar import progress

OTHER_WEIGHTS = re.compile(r"^consolidated|\.(bin|pt|pth|gguf|h5|msgpack)(\.|$)")
"""Files with the base's weights in other formats, which would not be those of the merged model."""


class LoRA(NamedTuple):
    """Low-rank update: A (E, r, I) and B (E, O, r), or (r, I) and (O, r), and the factor of their product."""

    a: Tensor
    b: Tensor
    scaling: float

    def transposed(self) -> LoRA:
        """Return the update of the transposed matrix."""
        return LoRA(self.b.mT, self.a.mT, self.scaling)


class MergedModel:
    """A base model with updates of its weights.

    Args:
        folder: The base's folder, or None if it is not known.

    Raises:
        UserError: The base has no safetensors files, or damaged ones.
    """

    def __init__(self, folder: Path | None):
        if folder is None:
            raise UserError(f"base: {layouts.CONFIG} names no folder with a model. Give the folder of the base model.")
        base = open_checkpoint(folder)
        if not isinstance(base, SafetensorsFiles) or base.problems:
            said = base.problems[0] if base.problems else f"has the format {base.kind} instead of safetensors"
            raise UserError(f"base: {str(folder)!r}: {said}. Save the model again with save_pretrained.")
        self.base = base
        self.in_model = renaming_of_files(str(base.config.get("model_type")))
        tensors = [name for name, each in base.tensors.items() if not OTHER_WEIGHTS.search(each.file)]
        self.names = {name.removesuffix(".weight"): name for name in tensors}
        self.names |= {self.in_model(name).removesuffix(".weight"): name for name in tensors}
        """Name in files by module, or parameter of experts, in the model and in files."""
        self.updates: dict[str, LoRA] = {}

    def _key(self, name: str) -> str:
        """Return the key in `names` of a module in an adapter file, also if there is none."""
        plain = name.removeprefix(layouts.PREFIX)
        return plain if plain in self.names else self.in_model(f"{plain}.weight").removesuffix(".weight")

    def has_separate(self, modules: Iterable[str]) -> bool:
        """Whether the files have a tensor for each expert of experts modules."""
        layers = {match["layer"] for match in map(EXPERT.fullmatch, self.names) if match}
        return any(
            not layers.isdisjoint({module.removeprefix(layouts.PREFIX), self._key(module)}) for module in modules
        )

    def add(self, loras: Iterable[tuple[str, LoRA]]) -> None:
        """Add the updates of modules and parameters. Raises UserError if the base has none of their shape."""
        for name, lora in loras:
            if (key := self._key(name)) not in self.names:
                raise UserError(f"base: has no weight {key}, which has adapters. Give their own base, not quantized.")
            tensor = self.names[key]
            shape, dtype, _ = self.base.tensors[tensor]
            if dtype.lower() not in UNQUANTIZED:
                raise UserError(f"base: {tensor} has the quantized type {dtype}. Give the model without quantization.")
            oriented = [lora, lora.transposed()] if lora.a.ndim == lora.b.ndim == 3 else [lora]
            fits = [each for each in oriented if (*each.b.shape[:-1], *each.a.shape[-1:]) == shape]
            if not fits or lora.b.shape[-1:] != lora.a.shape[-2:-1] or lora.a.ndim != len(shape):
                sizes = f"{tuple(lora.b.shape)} and {tuple(lora.a.shape)}"
                raise UserError(f"base: {tensor} has shape {shape}, and its adapters {sizes}. Give their own base.")
            self.updates[tensor] = fits[len(fits) > 1 and self._is_transposed(key)]

    def _is_transposed(self, square: str) -> bool:
        """Whether square matrices of experts are (inputs, outputs), by the other matrices of their module."""
        module = square.rpartition(".")[0]
        shapes = {
            name.rpartition(".")[2]: self.base.tensors[tensor].shape
            for name, tensor in self.names.items()
            if name.rpartition(".")[0] == module
        }
        sizes = {name: (shape[2], shape[1]) for name, shape in shapes.items() if len(shape) == 3}
        is_swapped = layouts.is_swapped(sizes, settings_of_experts(self.base.config).get("hidden_size"))
        if is_swapped is None:
            raise UserError(f"base: {square} does not show which side is the input. Merge the adapters with PEFT.")
        return is_swapped

    def write(self, target: Path) -> None:
        """Write the files of the base with the updates to the new folder `target`."""
        adapted = {self.base.tensors[name].file for name in self.updates}
        paths = [path for path in sorted(self.base.folder.iterdir()) if path.is_file()]
        target.mkdir(parents=True)
        try:
            for path in progress([path for path in paths if not OTHER_WEIGHTS.search(path.name)], "writing files"):
                if path.name not in adapted:
                    shutil.copy(path, target)
                    continue
                with safe_open(path, "pt") as opened:
                    metadata = opened.metadata()
                tensors = load_file(path)
                common = tensors.keys() & self.updates.keys()
                tensors |= {name: _added(tensors[name], self.updates[name]) for name in common}
                save_file(tensors, target / path.name, metadata=metadata)
        except BaseException:
            shutil.rmtree(target)
            raise


def _added(weight: Tensor, lora: LoRA) -> Tensor:
    """Return a weight with an update added, one expert at a time, and rounded once."""
    merged, dtype = weight.clone(), torch.promote_types(weight.dtype, torch.float32)
    for w_OI, a_RI, b_OR in zip(merged, lora.a, lora.b, strict=True) if merged.ndim == 3 else [(merged, *lora[:2])]:
        w_OI.copy_(w_OI.to(dtype) + lora.scaling * (b_OR.to(dtype) @ a_RI.to(dtype)))
    return merged
