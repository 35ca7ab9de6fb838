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
- PEFT before 0.19.1, and NeMo AutoModel before NVIDIA-NeMo/Automodel#3284: the same, of the transposed matrices, except
  where transformers has them transposed. A is (E * r, O) and B is (I, r * E).
- Unsloth: PEFT's file. Before unslothai/unsloth-zoo#1269, B had the expert as the slowest index; `lora_B_layout` of the
  settings tells since unslothai/unsloth-zoo#1232. For 4-bit gpt-oss it writes `experts.gate_up_projs.3.lora_A`, a pair
  for each expert (unslothai/unsloth#6936).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor

from toolkit.experts.layer.stack import RowsInFiles, stacked

WEIGHTS, CONFIG, RECORD = "adapter_model.safetensors", "adapter_config.json", "adapter_record.json"
NEMO = "automodel_peft_config.json"
"""Settings of NeMo AutoModel next to PEFT's."""
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
TRANSPOSED = {"lora_A": "lora_B", "lora_B": "lora_A"}
PEFT_ORDER, EXPERT_ORDER = "rank_major", "grouped_by_expert"
"""Values of `lora_B_layout`: the columns of B by rank, then expert, or by expert, then rank."""
SURE = 3.0
"""Standard errors by which the columns of an expert are more alike in one order than in the other."""
Rank = Annotated[int, Field(gt=0, lt=2**16)]
Number = Annotated[int, Field(gt=-(2**53), lt=2**53)] | FiniteFloat


class AdapterSettings(BaseModel):
    """The settings in `adapter_config.json` that are needed to read adapters; others are kept."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: Literal["LORA"] = "LORA"
    r: Rank
    lora_alpha: Number = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
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

    def scaling(self, rank: int) -> float:
        """Return the factor of an adapter of `rank` without an alpha of its own."""
        return self.lora_alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def version(self) -> tuple[int, ...] | None:
        """Version of PEFT that wrote the file, if it says so."""
        return tuple(map(int, re.findall(r"\d{1,9}", self.peft_version or "")[:3])) or None

    def is_swapped(self, sizes: Mapping[str, tuple[int, int]], hidden: int | None) -> bool | None:
        """Return whether adapters are of transposed matrices, None if it cannot be told.

        Args:
            sizes: Inputs of A and outputs of B by parameter of a module.
            hidden: Size of hidden states, which the last parameter gives and the others take.
        """
        names = in_order(sizes)
        if len(names) == 2 and len({*sizes[names[0]], *sizes[names[1]]}) > 1:
            (inputs, outputs), (last_inputs, last_outputs) = (sizes[name] for name in names)
            halves = outputs == 2 * last_inputs, inputs == 2 * last_outputs
            if any(halves) and (inputs, last_inputs) != (outputs, last_outputs):
                return halves[1]
        for name, size in sizes.items():
            if hidden in size and size[0] != size[1]:
                return size[name.startswith("down")] != hidden
        return None if self.version is None else self.version < OLDEST_LAYOUT

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


def of_experts(value: Tensor, matrix: str, rank: int, order: str | None = PEFT_ORDER) -> Tensor:
    """Return PEFT's `value` of A or B, or vLLM's with three dimensions, as A (E, r, I) or B (E, O, r)."""
    if value.ndim == 3:
        return value if matrix == "lora_A" else value.permute(2, 0, 1).contiguous()
    if matrix == "lora_B" and order == EXPERT_ORDER:
        return value.view(len(value), -1, rank).transpose(0, 1).contiguous()
    return stacked(value, IN_FILES[matrix], value.shape[0 if matrix == "lora_A" else 1] // rank)


def order_of_columns(values: Iterable[tuple[Tensor, int]]) -> str | None:
    """Return the order of the columns of `lora_B`, None if it cannot be told.

    Columns of one expert learn from the same tokens, so that their directions and norms are similar.

    Args:
        values: Each `lora_B` of stacked experts with its rank.
    """
    alike: dict[str, list[Tensor]] = {PEFT_ORDER: [], EXPERT_ORDER: []}
    is_shared = False
    for value, rank in values:
        found = {}
        for order in alike if value.shape[1] > rank > 1 and value.double().any() else ():
            b_EOr = of_experts(value.double(), "lora_B", rank, order)
            products_Err = b_EOr.mT @ b_EOr
            squares_Er = products_Err.diagonal(dim1=1, dim2=2)
            likeness_Err = (products_Err / torch.maximum(squares_Er[:, None], squares_Er[..., None])).square()
            likeness_Err.diagonal(dim1=1, dim2=2).zero_()
            pairs_E = (likeness_Err > 0).sum((1, 2))  # others have a column of zeros, or no common rows
            found[order] = (likeness_Err.nansum((1, 2)) / pairs_E)[pairs_E > 0]
            if (likeness_Err > 1 - 1e-12).any():  # experts share it, so that columns of different experts are alike
                is_shared = True
                found.clear()
                break
        for order, likeness_E in found.items():
            alike[order].append(likeness_E)
    if not alike[PEFT_ORDER]:
        return None if is_shared else PEFT_ORDER
    peft_E, expert_E = map(torch.cat, alike.values())
    error = (peft_E.var() / len(peft_E) + expert_E.var() / len(expert_E)).sqrt()
    difference = peft_E.mean() - expert_E.mean()
    if not difference.abs() > SURE * error:
        return None
    return PEFT_ORDER if difference > 0 else EXPERT_ORDER
