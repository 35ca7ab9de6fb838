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
from torch.nn.functional import normalize

from toolkit.experts.layer.rows_in_files import RowsInFiles, stacked

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
SURE = 4.0
"""Standard deviations that tell the order of columns, which chance exceeds once in 16,000 adapters."""
COMPARED = 512
"""Columns of a `lora_B` that are compared with each other."""
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


def is_swapped(sizes: Mapping[str, tuple[int, int]], hidden: int | None) -> bool | None:
    """Return whether matrices of experts are transposed, None if it cannot be told.

    Args:
        sizes: Inputs and outputs by parameter of a module.
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
    return None


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


def order_of_columns(values: Iterable[tuple[Tensor, Tensor, int]]) -> str | None:
    """Return the order of the columns of `lora_B`, None if it cannot be told.

    B begins at zero, so that column b is a gradient of its expert times the row a of A of its rank. The columns of an
    expert have similar directions, and the more so the more similar their rows. Let W be 1 for two columns of one
    expert in an order, and 0 for others. cos(b, b')^2 is compared with W, and cos(b, b') with W cos(a, a'). By Mantel's
    test, with values F and G of the pairs of n columns, centered so that rows without the diagonal sum to zero,

        z = <F, G> / (|F| |G|) * sqrt(n (n - 3) / 2)

    has mean 0 and variance 1 if nothing relates columns to experts. The z of an order is the sum of both over all
    matrices, divided by the square root of their number. The order is told if z exceeds `SURE` and twice the other's.

    Args:
        values: Each `lora_A` and `lora_B` of stacked experts with its rank.
    """
    terms, z_of_orders, is_one_order = 0, torch.zeros(2).double(), True
    draws = torch.Generator().manual_seed(0)
    for a, b, rank in ((a.double(), b.double(), rank) for a, b, rank in values):
        if not b.shape[1] > rank > 1:
            continue
        is_one_order = False
        used = b.any(0).nonzero()[:, 0]  # others are padding, or of experts without tokens
        columns_n = used[torch.randperm(len(used), generator=draws)[:COMPARED]]
        n, experts = len(columns_n), b.shape[1] // rank
        by_order = (of_experts(b, "lora_B", rank, order) for order in (PEFT_ORDER, EXPERT_ORDER))
        if n < 4 or any((b_EOr == b_EOr[:1]).all() for b_EOr in by_order):
            continue  # experts that share it make columns of different experts alike
        row_2n = torch.stack([columns_n % experts * rank + columns_n // experts, columns_n])
        is_same_2nn = (row_2n // rank)[:, :, None] == (row_2n // rank)[:, None]
        a_2nI, b_nO = (normalize(each.nan_to_num(0, 0, 0), dim=-1) for each in (a[row_2n], b.T[columns_n]))
        b_nn, others_nn = b_nO @ b_nO.T, 1 - torch.eye(n)
        pairs_6nn = torch.stack([b_nn.square(), *is_same_2nn, b_nn, *(is_same_2nn * (a_2nI @ a_2nI.mT))]) * others_nn
        mean_6n = pairs_6nn.sum(1) / (n - 2)
        pairs_6nn += mean_6n.sum(1)[:, None, None] / (n - 1) - mean_6n[:, None] - mean_6n[:, :, None]
        unit = normalize((pairs_6nn * others_nn).flatten(1))
        z_of_orders += (unit[1:3] @ unit[0] + unit[4:] @ unit[3]) * math.sqrt(n * (n - 3) / 2)
        terms += 2
    if is_one_order:
        return PEFT_ORDER
    peft, expert = (z_of_orders / math.sqrt(max(1, terms))).tolist()
    if max(peft, expert) <= max(SURE, 2 * min(peft, expert)):
        return None
    return PEFT_ORDER if peft > expert else EXPERT_ORDER
