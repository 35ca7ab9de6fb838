"""Names, shapes and settings of expert adapters in files of PEFT, vLLM, SGLang and Unsloth.

All store the adapters of attention alike, and those of experts differently. With E experts, rank r, and I inputs and O
outputs of a matrix such as `gate_up_proj` or `down_proj`:

- PEFT (0.19.1 and newer, `target_parameters`): `experts.base_layer.lora_A` and `.lora_B` are of the first parameter of
  the module, `experts.lora_A` and `.lora_B` of the last one, in any order of `target_parameters`
  (sgl-project/sglang#25528). A is (E * r, I), one expert after the other, and B is (O, r * E) with the expert as the
  fastest index (unslothai/unsloth-zoo#1269). NeMo AutoModel writes the same (NVIDIA-NeMo/Automodel#3284).
- vLLM: `experts.3.gate_proj.lora_A`, (r, I) and (O, r), a pair for each expert and linear layer of the checkpoint
  (OpenPipe/ART#688). Models whose checkpoints have stacked experts take PEFT's file instead
  (vllm-project/vllm#47088), or its names with A as (E, r, I) and B as (O, r, E) (NVIDIA-NeMo/Megatron-Bridge#5939).
- SGLang: `experts.gate_up_proj.lora_A`, (E, r, I) and (E, O, r) (NVIDIA-NeMo/Megatron-Bridge#6075), or with dimension 1
  instead of E for a matrix that all experts share (NVIDIA-NeMo/Megatron-Bridge#3981).
- Unsloth: PEFT's file. Before unslothai/unsloth-zoo#1269, B had the expert as the slowest index; `lora_B_layout` of the
  settings tells since unslothai/unsloth-zoo#1232. For 4-bit gpt-oss it writes `experts.gate_up_projs.3.lora_A`, a pair
  for each expert (unslothai/unsloth#6936).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor

from toolkit.experts.layer.stack import RowsInFiles, stacked

WEIGHTS, CONFIG, RECORD = "adapter_model.safetensors", "adapter_config.json", "adapter_record.json"
OLDEST_LAYOUT = (0, 19, 1)
"""Earlier PEFT versions swap inputs and outputs of most stacked parameters."""
PREFIX = "base_model.model."
"""Beginning of all names, because PEFT's model has the base below it."""
INNER = ".base_layer"
FUSED = re.compile(r"(?P<module>(?:.*\.)?experts)(?P<inner>(?:\.base_layer)*)\.(?P<matrix>lora_[AB])\.weight")
LISTED = re.compile(
    r"(?P<module>(?:.*\.)?experts)\.(?P<linear>\w+)s\.(?P<expert>\d{1,9})\.(?P<matrix>lora_[AB])\.weight"
)
STACKED = re.compile(r"(?:.*\.)?experts\.[a-z]\w*\.lora_[AB]\.weight")
IN_FILES: dict[str, RowsInFiles] = {"lora_A": "joined", "lora_B": "columns"}
"""How PEFT stores the two matrices of all experts."""
Number = int | FiniteFloat


class AdapterSettings(BaseModel):
    """The settings in `adapter_config.json` that are needed to read adapters; others are kept."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: Literal["LORA"] = "LORA"
    r: Annotated[int, Field(gt=0, lt=2**16)]
    lora_alpha: Number = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, Number] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    exclude_modules: list[str] | str | None = None
    base_model_name_or_path: str | None = None
    peft_version: str | None = None
    lora_B_layout: str | None = None

    def rank(self, name: str) -> int:
        """Return the rank of the adapters of the module or parameter `name`, by PEFT's rule for suffixes.

        Other regular expressions are not evaluated, because some take forever.
        """
        suffixes = {
            key.strip("^$").removeprefix(".*").replace("\\", "").removeprefix("."): rank
            for key, rank in (self.rank_pattern or {}).items()
        }
        return next((rank for suffix, rank in suffixes.items() if f".{name}".endswith(f".{suffix}")), self.r)

    @property
    def scaling(self) -> float:
        """Factor of an adapter without a pattern of its own."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def is_swapped(self) -> bool:
        """Whether a version of PEFT wrote the file that has inputs and outputs of stacked experts swapped."""
        numbers = tuple(map(int, re.findall(r"\d{1,9}", self.peft_version or "0")[:3]))
        return bool(self.target_parameters) and numbers < OLDEST_LAYOUT

    @property
    def parameters_of_experts(self) -> set[str]:
        """Parameters of experts that are named as adapted."""
        targets = (target.rpartition(".") for target in self.target_parameters or ())
        return {name for path, _, name in targets if path.endswith("experts")}

    @property
    def is_of_some_layers(self) -> bool:
        """Whether settings choose layers."""
        targets = [*(self.target_parameters or ()), *(self.target_modules or ())]
        chosen = self.layers_to_transform is not None or self.exclude_modules is not None
        return chosen or isinstance(self.target_modules, str) or any(re.search(r"\d", target) for target in targets)

    def parameters(self, module: str) -> list[str]:
        """Return the names of the parameters of `module` that are adapted, in their order in the module."""
        targets = [target.rpartition(".") for target in self.target_parameters or ()]
        return in_order(name for path, _, name in targets if not path or f".{module}".endswith(f".{path}"))


def in_order(parameters: Iterable[str]) -> list[str]:
    """Return each name once, that of the output matrix last, as modules list them."""
    return sorted(set(parameters), key=lambda name: (name.startswith("down"), name))


def shape_of_experts(shape: Sequence[int], matrix: str, rank: int) -> tuple[int, ...] | None:
    """Return the shape of `of_experts`, or None for a file that does not have this rank."""
    if len(shape) == 3:
        return tuple(shape) if matrix == "lora_A" else (shape[2], shape[0], shape[1])
    if len(shape) != 2 or 0 in shape or shape[0 if matrix == "lora_A" else 1] % rank:
        return None
    return (shape[0] // rank, rank, shape[1]) if matrix == "lora_A" else (shape[1] // rank, shape[0], rank)


def of_experts(value: Tensor, matrix: str, rank: int) -> Tensor:
    """Return PEFT's `value` of A or B, or vLLM's with three dimensions, as A (E, r, I) or B (E, O, r)."""
    if value.ndim == 3:
        return value if matrix == "lora_A" else value.permute(2, 0, 1).contiguous()
    return stacked(value, IN_FILES[matrix], value.shape[0 if matrix == "lora_A" else 1] // rank)
