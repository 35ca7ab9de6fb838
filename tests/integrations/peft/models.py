"""Small MoE models with PEFT adapters, and their tensors by expert."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.support import families
from benchmarks.support.families import EXPERTS, model_of
from toolkit.experts.parallel.ownership import ownership_of

MATRICES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {
    "deepseek_v3": {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa"]},
    "nemotron_h": {"target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"]},
}
FAMILIES = (*families.FAMILIES, "olmoe", "qwen2_moe", "glm4_moe", "dots1", "nemotron_h")


def base(family: str) -> Any:
    return model_of(family, dtype=torch.float64, experts_implementation="eager")


def lora_config(**options: Any) -> LoraConfig:
    """Return a configuration of random adapters, all of which have gradients at once."""
    usual: dict[str, Any] = {"r": 3, "lora_alpha": 12, "init_lora_weights": False}
    usual |= {"target_modules": ["q_proj", "v_proj"], "target_parameters": MATRICES}
    return LoraConfig(**usual | options)


def add_adapters(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**{"target_modules": ["q_proj"], "target_parameters": MATRICES} | options))


def adapted(family: str, **options: Any) -> Any:
    model = base(family)
    torch.manual_seed(1)
    return get_peft_model(model, lora_config(**TARGETS.get(family, {}) | options))


def _by_expert(name: str, parameter: nn.Parameter, value: Tensor, experts: int) -> dict[str, Tensor]:
    """Return the rows of `value`, in the layout of `parameter` here or in unmodified PEFT, as "<name>/<expert>"."""
    ownership = ownership_of(parameter)
    if ownership is not None:
        held = zip(ownership.row_ids, ownership.owns, value, strict=True)
        return {f"{name}/{expert}": row.clone() for expert, owned, row in held if owned}
    if "experts" not in name or "shared" in name:
        return {name: value.clone()}
    if "lora_A" in name:
        rows = list(value.view(experts, -1, value.shape[1]))
    elif "lora_B" in name:
        rows = [value[:, expert::experts] for expert in range(experts)]
    else:
        rows = list(value)
    return {f"{name}/{expert}": row.clone() for expert, row in enumerate(rows)}


def rows(model: nn.Module, *, grads: bool = False, experts: int = EXPERTS) -> dict[str, Tensor]:
    """Return the parameters that this rank owns, or their gradients, by names that do not depend on the placement."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if grads else parameter.detach()
        if grads and not parameter.requires_grad:
            assert value is None, f"{name} is frozen and has a gradient"
            continue
        if value is None:  # an expert without tokens, on one process
            value = torch.zeros_like(parameter)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found |= _by_expert(name, parameter, value.detach(), experts)
    return found


def together(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: row for rank in ranks for name, row in rank.items()}
