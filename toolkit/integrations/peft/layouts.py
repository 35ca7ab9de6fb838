"""Files of expert adapters in the layouts of PEFT, vLLM and SGLang.

All store the adapters of attention alike, and those of experts differently. With E experts, rank r, and I inputs and O
outputs of a stacked parameter such as `gate_up_proj` or `down_proj`:

- PEFT (0.19.1 and newer, `target_parameters`): `experts.base_layer.lora_A` and `.lora_B` are of the first parameter,
  `experts.lora_A` and `.lora_B` of the last one. A is (E * r, I), one expert after the other, and B is (O, r * E) with
  the expert as the fastest index (unslothai/unsloth-zoo#1269).
- vLLM: `experts.3.gate_proj.lora_A`, (r, I) and (O, r), a pair for each expert and linear layer of the checkpoint.
  Models whose checkpoints have stacked experts take PEFT's names, with A as (E, r, I) and B as (O, r, E)
  (NVIDIA-NeMo/Megatron-Bridge#5939).
- SGLang: `experts.gate_up_proj.lora_A`, (E, r, I) and (E, O, r) (NVIDIA-NeMo/Megatron-Bridge#6075).
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.errors import UserError, reading
from toolkit.experts.layer.stack import RowsInFiles, as_in_files, stacked
from toolkit.integrations.transformers.compat import names_of_separate_experts

WEIGHTS, CONFIG, RECORD = "adapter_model.safetensors", "adapter_config.json", "adapter_record.json"
OLDEST_LAYOUT = (0, 19, 1)
"""Earlier PEFT versions swap inputs and outputs of most stacked parameters."""
PREFIX = "base_model.model."
"""Beginning of all names, because PEFT's model has the base below it."""
FUSED = re.compile(r"(?P<module>.*experts)(?P<inner>(?:\.base_layer)*)\.(?P<matrix>lora_[AB])\.weight")
SEPARATE = re.compile(r"(?P<module>.*experts)\.(?P<expert>\d{1,9})\.(?P<linear>\w+)\.(?P<matrix>lora_[AB])\.weight")
STACKED = re.compile(r"(?P<module>.*experts)\.(?P<parameter>[a-z]\w*)\.(?P<matrix>lora_[AB])\.weight")
IN_FILES: dict[str, RowsInFiles] = {"lora_A": "joined", "lora_B": "columns"}
"""How PEFT stores the two matrices of all experts."""


class LoRA(NamedTuple):
    """Low-rank update of one stacked parameter: A (E, r, I) and B (E, O, r)."""

    a_ERI: Tensor
    b_EOR: Tensor


Tensors = dict[str, Tensor]
Adapters = dict[tuple[str, str], LoRA]
"""By experts module and parameter, such as `("base_model.model.model.layers.0.mlp.experts", "down_proj")`."""
Settings = dict[str, Any]


def fused_parameters(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the stacked parameters that `adapter_config.json` adapts, in the order of modules."""
    targets = settings.get("target_parameters") or ()
    return in_order(str(target).rpartition(".")[2] for target in targets if "experts." in str(target))


def in_order(parameters: Iterable[str]) -> list[str]:
    """Return each name once, that of the output matrix last, as modules list them."""
    return sorted(set(parameters), key=lambda name: (name.startswith("down"), name))


def shape_of_experts(shape: Sequence[int], matrix: str, rank: int) -> tuple[int, ...] | None:
    """Return the shape of `of_experts`, or None for a file that does not have this rank."""
    if len(shape) == 3:
        return tuple(shape) if matrix == "lora_A" else (shape[2], shape[0], shape[1])
    if len(shape) != 2 or shape[0 if matrix == "lora_A" else 1] % rank:
        return None
    return (shape[0] // rank, rank, shape[1]) if matrix == "lora_A" else (shape[1] // rank, shape[0], rank)


def of_experts(value: Tensor, matrix: str, rank: int) -> Tensor:
    """Return PEFT's `value` of A or B, or vLLM's with three dimensions, as A (E, r, I) or B (E, O, r)."""
    if value.ndim == 3:
        return value if matrix == "lora_A" else value.permute(2, 0, 1).contiguous()
    experts = value.shape[0 if matrix == "lora_A" else 1] // rank
    return stacked(value, IN_FILES[matrix], experts)


class Layout(ABC):
    """How a program names and stores the adapters of experts."""

    @abstractmethod
    def take(self, tensors: Tensors, settings: Settings) -> Adapters:
        """Remove the adapters of experts from `tensors`, and their entries from `settings`; return them."""

    @abstractmethod
    def put(self, adapters: Adapters, tensors: Tensors, settings: Settings) -> None:
        """Add the adapters of experts to `tensors`, and their entries to `settings`."""


class PeftLayout(Layout):
    """PEFT's `target_parameters`."""

    def take(self, tensors: Tensors, settings: Settings) -> Adapters:
        parameters = fused_parameters(settings)
        pairs: dict[str, dict[tuple[int, str], Tensor]] = defaultdict(dict)
        for name in [name for name in tensors if FUSED.fullmatch(name)]:
            match = FUSED.fullmatch(name)
            assert match
            depth = match["inner"].count(".base_layer")
            pairs[match["module"]][depth, match["matrix"]] = of_experts(
                tensors.pop(name), match["matrix"], settings["r"]
            )
        found: Adapters = {}
        for module, matrices in pairs.items():
            depths = sorted({depth for depth, _ in matrices}, reverse=True)  # the first parameter is wrapped first
            if len(depths) != len(parameters) or len(matrices) != 2 * len(depths):
                raise UserError(f"{CONFIG}: target_parameters do not fit the adapters of {module}. Save them again.")
            for depth, parameter in zip(depths, parameters, strict=True):
                found[module, parameter] = LoRA(matrices[depth, "lora_A"], matrices[depth, "lora_B"])
        settings["target_parameters"] = None
        return found

    def put(self, adapters: Adapters, tensors: Tensors, settings: Settings) -> None:
        parameters = in_order(name for _, name in adapters)
        for (module, parameter), pair in adapters.items():
            inner = ".base_layer" * (len(parameters) - 1 - parameters.index(parameter))
            for matrix, value in zip(IN_FILES, pair, strict=True):
                tensors[f"{module}{inner}.{matrix}.weight"] = as_in_files(value, IN_FILES[matrix]).contiguous()
        modules = dict.fromkeys(_in_layer(module) for module, _ in adapters)
        settings["target_parameters"] = [f"{module}.{parameter}" for module in modules for parameter in parameters]


class VllmLayout(Layout):
    """A pair for each expert and linear layer, under the names of the base's checkpoint.

    Args:
        model_type: Of the base's `config.json`, for transformers' names of its checkpoint.
    """

    def __init__(self, model_type: str):
        self.modules, self.linears = names_of_separate_experts(model_type)
        if not self.linears:
            raise UserError(
                f"to='vllm': checkpoints of {model_type} have no linear layers of experts. Take another one."
            )

    def take(self, tensors: Tensors, settings: Settings) -> Adapters:
        values: dict[tuple[str, str, str], dict[int, Tensor]] = defaultdict(dict)
        for name in [name for name in tensors if SEPARATE.fullmatch(name)]:
            match = SEPARATE.fullmatch(name)
            assert match
            module = self._rename(match["module"], back=True)
            values[module, match["linear"], match["matrix"]][int(match["expert"])] = tensors.pop(name)
        found: Adapters = {}
        for module in dict.fromkeys(module for module, _, _ in values):
            for parameter, linears in self.linears.items():
                parts = [[values.get((module, linear, matrix), {}) for linear in linears] for matrix in IN_FILES]
                if any(map(any, parts)):
                    found[module, parameter] = _joined(f"{module}.{parameter}", *parts)
        own = {linear for each in self.linears.values() for linear in each}
        settings["target_modules"] = [name for name in settings["target_modules"] if name not in own]
        return found

    def put(self, adapters: Adapters, tensors: Tensors, settings: Settings) -> None:
        for (module, parameter), (a_ERI, b_EOR) in adapters.items():
            linears = self.linears[parameter]
            for linear, part_EOR in zip(linears, b_EOR.chunk(len(linears), 1), strict=True):
                for expert, (a_RI, b_OR) in enumerate(zip(a_ERI, part_EOR, strict=True)):
                    name = f"{self._rename(module)}.{expert}.{linear}"
                    tensors[f"{name}.lora_A.weight"] = a_RI.clone()
                    tensors[f"{name}.lora_B.weight"] = b_OR.clone()
        used = [linear for name in in_order(name for _, name in adapters) for linear in self.linears[name]]
        settings["target_modules"] = [*settings["target_modules"], *used]

    def _rename(self, module: str, *, back: bool = False) -> str:
        for in_files, in_model in self.modules:
            module = module.replace(in_files, in_model) if back else module.replace(in_model, in_files)
        return module


class SglangLayout(Layout):
    """A stacked pair for each parameter."""

    def take(self, tensors: Tensors, settings: Settings) -> Adapters:
        pairs: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
        for name in [name for name in tensors if STACKED.fullmatch(name)]:
            match = STACKED.fullmatch(name)
            assert match
            pairs[match["module"], match["parameter"]][match["matrix"]] = tensors.pop(name)
        names = {parameter for _, parameter in pairs}
        settings["target_modules"] = [name for name in settings["target_modules"] if name not in names]
        return {key: LoRA(pair["lora_A"], pair["lora_B"]) for key, pair in pairs.items() if len(pair) == 2}

    def put(self, adapters: Adapters, tensors: Tensors, settings: Settings) -> None:
        for (module, parameter), pair in adapters.items():
            for matrix, value in zip(IN_FILES, pair, strict=True):
                tensors[f"{module}.{parameter}.{matrix}.weight"] = value.contiguous()
        settings["target_modules"] = [*settings["target_modules"], *in_order(name for _, name in adapters)]


def _joined(name: str, a: Sequence[dict[int, Tensor]], b: Sequence[dict[int, Tensor]]) -> LoRA:
    """Return the adapter of a stacked parameter from those of its linear layers, by expert."""
    experts = range(1 + max(a[0], default=-1))
    if any(set(each) != set(experts) for each in (*a, *b)):
        raise UserError(f"{name}: some experts or linear layers have no adapter. Another layout cannot say so.")
    if any(not torch.equal(a[0][expert], each[expert]) for each in a[1:] for expert in experts):
        raise UserError(f"{name}: its linear layers have different lora_A. A stacked layout has one for all of them.")
    return LoRA(
        torch.stack([a[0][expert] for expert in experts]),
        torch.stack([torch.cat([each[expert] for each in b]) for expert in experts]),
    )


def convert(source: Path, target: Path, to: str, base: Path | None = None) -> int:
    """Write the adapters in `source` to the new folder `target`, in another layout.

    Each expert's update `lora_B @ lora_A` is computed in float64 from both files and has to be equal.

    Args:
        source: A folder with `adapter_config.json` and `adapter_model.safetensors`, in any layout.
        target: The folder to make.
        to: "peft", "vllm" or "sglang".
        base: The folder of the base model, for the names of vLLM. None: as in `adapter_config.json`.

    Returns:
        The number of experts' updates that were compared.

    Raises:
        UserError: The other layout cannot express the adapters. Nothing was written.
    """
    with reading(source, "Give a folder that save_pretrained of PEFT wrote, or one of these layouts."):
        settings = json.loads((source / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(source / WEIGHTS)
    _require_convertible(settings)
    separate = any(map(SEPARATE.fullmatch, tensors))
    vllm = VllmLayout(_model_type(base, settings)) if separate or to == "vllm" else None
    layouts: dict[str, Layout | None] = {"peft": PeftLayout(), "vllm": vllm, "sglang": SglangLayout()}
    fused = any(map(FUSED.fullmatch, tensors))
    read, write = layouts["vllm" if separate else "peft" if fused else "sglang"], layouts[to]
    assert read
    assert write
    adapters = read.take(tensors, settings)
    if not adapters:
        raise UserError(f"{source}: has no adapters of experts. They are the same in every layout.")
    for (module, parameter), (a_ERI, b_EOR) in adapters.items():
        if a_ERI.shape[:2] != (len(b_EOR), b_EOR.shape[2]):
            shapes = f"lora_A {tuple(a_ERI.shape)} and lora_B {tuple(b_EOR.shape)}"
            raise UserError(f"{module}.{parameter}: {shapes} do not fit. Another layout needs a pair for each expert.")
    write.put(adapters, tensors, settings)
    again = write.take(dict(tensors), dict(settings))
    for key, (a_ERI, b_EOR) in adapters.items():
        if not torch.equal(b_EOR.double() @ a_ERI.double(), again[key].b_EOR.double() @ again[key].a_ERI.double()):
            raise AssertionError(f"{key}: the update changed")
    target.mkdir(parents=True)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
    return sum(len(pair.a_ERI) for pair in adapters.values())


def scaling(settings: Mapping[str, Any]) -> float:
    """Return the factor of an adapter without a pattern of its own."""
    rank = settings["r"]
    return float(settings.get("lora_alpha", 8)) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def is_swapped(settings: Mapping[str, Any]) -> bool:
    """Return whether a version of PEFT wrote the file that has inputs and outputs of stacked experts swapped."""
    numbers = tuple(map(int, re.findall(r"\d+", str(settings.get("peft_version") or "0"))[:3]))
    return bool(settings.get("target_parameters")) and numbers < OLDEST_LAYOUT


def _require_convertible(settings: Any) -> None:
    rank = settings.get("r") if isinstance(settings, dict) else None
    if not isinstance(rank, int) or rank < 1 or not isinstance(settings.get("target_modules"), list | None):
        raise UserError(f"{CONFIG}: is not of a LoRA adapter. Give the folder of one.")
    settings["target_modules"] = settings.get("target_modules") or []
    unknown = [name for name in ("use_dora", "lora_bias", "rank_pattern", "alpha_pattern") if settings.get(name)]
    if unknown:
        raise UserError(f"{CONFIG}: has {unknown[0]}, which is not converted. Use it with the program that wrote it.")
    if is_swapped(settings):
        version = ".".join(map(str, OLDEST_LAYOUT))
        raise UserError(
            f"{CONFIG}: is of a PEFT before {version}, which swaps inputs and outputs. Save it with that one."
        )


def _model_type(base: Path | None, settings: Mapping[str, Any]) -> str:
    folder = base or Path(settings.get("base_model_name_or_path") or "")
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"base: {str(folder)!r} has no config.json. Give the folder of the base model.")
    with reading(path, "Give the folder of the base model."):
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])


def _in_layer(module: str) -> str:
    """Return `mlp.experts` of `base_model.model.model.layers.3.mlp.experts`."""
    return re.split(r"\.\d+\.", module)[-1]
