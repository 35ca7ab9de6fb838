"""LoRA adapters of experts, trained and saved by the toolkit, and the faults that `audit.py` plants in them."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.planted_models import Fault, lose, rename
from benchmarks.support.families import EXPERTS, model_of, tokens
from toolkit.integrations.transformers import causal_lm, save_pretrained

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
LAYER = 1
RANK, ALPHA = 4, 8
OF_ATTENTION = ["q_proj", "v_proj"]
OF_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STEPS, SAMPLES = 3, 64


def save_base(folder: Path, family: str) -> Path:
    """Save a model without biases, with which some experts would get no tokens: the audit reports untrained experts."""
    model = model_of(family)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    model.save_pretrained(folder)
    return folder


def save_adapters(base: Path, folder: Path, **settings: Any) -> Path:
    """Train adapters of the model in `base` for `STEPS` steps, and save them."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

    torch.manual_seed(1)
    usual = {"r": RANK, "lora_alpha": ALPHA, "target_modules": OF_ATTENTION, "target_parameters": OF_EXPERTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised by transformers for a call of PEFT
        model = get_peft_model(causal_lm(base), LoraConfig(**usual | settings))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with contextlib.redirect_stdout(io.StringIO()):  # a summary of the experts
        model, optimizer = ExpertParallel(Accelerator(cpu=True)).prepare(model, optimizer)
    for step in range(STEPS):
        ids = tokens(step, samples=SAMPLES)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model, folder)
    return folder


@dataclass
class Adapters:
    """Saved adapters in PEFT's layout."""

    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    has_record: bool = True
    """Whether the toolkit's record of the training stays next to them."""

    def names(self, part: str) -> list[str]:
        """Return the tensors of the experts of `LAYER` whose names match `part`."""
        pattern = rf"\blayers\.{LAYER}\..*\bexperts\..*{part}"
        return [name for name in sorted(self.tensors) if re.search(pattern, name)]

    def experts(self, part: str) -> list[Tensor]:
        """Return views with the experts first, (E, r, I) of A and (E, O, r) of B."""
        values = ((name, self.tensors[name]) for name in self.names(part))
        return [by_expert(value, "lora_A" in name) for name, value in values]


def by_expert(value: Tensor, is_a: bool) -> Tensor:
    return value.view(-1, RANK, value.shape[1]) if is_a else value.view(len(value), RANK, -1).permute(2, 0, 1)


Plant = Callable[[Adapters], object]


def change(edit: Callable[[Tensor], object], part: str) -> Plant:
    """Edit the values of `Adapters.experts` in place."""

    def plant(adapters: Adapters) -> None:
        for view in adapters.experts(part):
            edit(view)

    return plant


def keep_experts(count: int) -> Plant:
    def plant(adapters: Adapters) -> None:
        for name in adapters.names("lora_A"):
            adapters.tensors[name] = adapters.tensors[name][: count * RANK].clone()
        for name in adapters.names("lora_B"):
            value = adapters.tensors[name]
            adapters.tensors[name] = value.view(len(value), RANK, -1)[..., :count].flatten(1)

    return plant


def zero(experts: slice) -> Callable[[Tensor], object]:
    def edit(x: Tensor) -> None:
        x[experts] = 0

    return edit


def fill(value: float) -> Callable[[Tensor], object]:
    def edit(x: Tensor) -> None:
        x[3, 0] = value

    return edit


def repeat(x: Tensor) -> None:
    x[5] = x[2]


def swap(x: Tensor) -> None:
    x[[1, 4]] = x[[4, 1]]


def repeat_layer(adapters: Adapters) -> None:
    for name in adapters.names("lora_"):
        adapters.tensors[name] = adapters.tensors[name.replace(f"layers.{LAYER}.", "layers.0.")].clone()


def order_by_expert(adapters: Adapters) -> None:
    """Write `lora_B` of experts as Unsloth before September 2026."""
    for name, value in adapters.tensors.items():
        if ".experts." in name and "lora_B" in name:
            adapters.tensors[name] = value.view(len(value), RANK, -1).mT.flatten(1)


def order_by_expert_elsewhere(adapters: Adapters) -> None:
    order_by_expert(adapters)
    adapters.has_record = False


def swap_sides(adapters: Adapters) -> None:
    """Write adapters of experts as PEFT before 0.19.1: of transposed matrices."""
    for name in [name for name in adapters.tensors if ".experts." in name and "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        a_ErI, b_EOr = (by_expert(adapters.tensors[each], each == name) for each in (name, other))
        adapters.tensors[name] = b_EOr.mT.flatten(0, 1)
        adapters.tensors[other] = a_ErI.permute(2, 1, 0).flatten(1)


def settings(**changed: Any) -> Plant:
    return lambda adapters: adapters.settings.update(changed)


def target_experts_in_vain(adapters: Adapters) -> None:
    lose(r"\.experts\.")(adapters)
    adapters.settings |= {"target_parameters": None, "target_modules": [*OF_ATTENTION, "gate_proj"]}


def halve_outputs(adapters: Adapters) -> None:
    for name in adapters.names("lora_B"):
        adapters.tensors[name] = adapters.tensors[name].chunk(2)[0].clone()


MISSING, VALUES, SETTINGS = (
    "missing experts, layers, matrices",
    "zeros, NaN, copies, norms",
    "order, scaling, rank, names, shapes",
)
IN_LAYER = rf"\blayers\.{LAYER}\."

FAULTS = [
    Fault(MISSING, "an expert", "experts", keep_experts(EXPERTS - 1)),
    Fault(MISSING, "experts of other ranks", "experts", keep_experts(EXPERTS // 2)),
    Fault(MISSING, "experts of a layer", "missing experts", lose(IN_LAYER + r".*\.experts\.")),
    Fault(MISSING, "a layer", "missing experts", lose(IN_LAYER)),
    Fault(MISSING, "one of two matrices", "missing experts files", lose(r"\.experts\.lora_")),
    Fault(MISSING, "lora_A only", "pairs files", lose(IN_LAYER + r".*\.experts\..*lora_B")),
    Fault(MISSING, "lora_B only", "pairs files", lose(IN_LAYER + r".*\.experts\..*lora_A")),
    Fault(MISSING, "all experts, which target_modules names", "missing", target_experts_in_vain),
    Fault(VALUES, "lora_B of zeros in an expert", "values", change(zero(slice(3, 4)), "lora_B")),
    Fault(VALUES, "lora_B of zeros in a layer", "values", change(zero(slice(None)), "lora_B")),
    Fault(VALUES, "lora_A of zeros in an expert", "values", change(zero(slice(3, 4)), "lora_A")),
    Fault(VALUES, "NaN", "values", change(fill(torch.nan), "lora_B")),
    Fault(VALUES, "infinity", "values", change(fill(torch.inf), "lora_A")),
    Fault(VALUES, "repeated expert", "repeats", change(repeat, "lora_")),
    Fault(VALUES, "experts of another layer", "repeats", repeat_layer),
    Fault(VALUES, "lora_B times 10", "values", change(lambda x: x.mul_(10), "lora_B")),
    Fault(SETTINGS, "experts swapped", "order", change(swap, "lora_")),
    Fault(SETTINGS, "lora_B of experts swapped", "order", change(swap, "lora_B")),
    Fault(SETTINGS, "columns of lora_B by expert", "order values files", order_by_expert),
    Fault(SETTINGS, "columns of lora_B by expert, without a record", "files", order_by_expert_elsewhere),
    Fault(SETTINGS, "another lora_alpha", "scaling", settings(lora_alpha=ALPHA * 2)),
    Fault(SETTINGS, "rsLoRA", "scaling", settings(use_rslora=True)),
    Fault(SETTINGS, "another rank", "pairs experts files scaling", settings(r=RANK * 2)),
    Fault(SETTINGS, "prefix module.", "files", rename("^", "module.")),
    Fault(SETTINGS, "prefix base_model.model. twice", "files", rename("^", "base_model.model.")),
    Fault(
        SETTINGS, "names of NeMo AutoModel", "files", rename(r"experts\.(base_layer\.)?lora_", r"experts.\1lora_of_")
    ),
    Fault(SETTINGS, "inputs and outputs exchanged", "files base", swap_sides),
    Fault(SETTINGS, "a layer that the base lacks", "base", rename(IN_LAYER, "layers.7.")),
    Fault(SETTINGS, "outputs of one rank", "base", halve_outputs),
]
HEALTHY = [
    {"r": rank, "use_rslora": is_rslora, "target_modules": modules, "target_parameters": parameters}
    for rank in (1, 4, 16)
    for is_rslora in (False, True)
    for modules, parameters in ((OF_ATTENTION, None), ([], OF_EXPERTS), (OF_ATTENTION, OF_EXPERTS))
]
"""Settings of adapters without a fault."""
