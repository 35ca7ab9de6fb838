"""Small mixtures of transformers with PEFT's adapters, and what an adapter holds of each expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.integrations.transformers import families
from tests.integrations.transformers.families import EXPERTS, awaken
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.integrations.transformers import causal_lm

ATTENTION = {"deepseek_v3": ["q_a_proj", "kv_a_proj_with_mqa"]}
MATRICES = {"nemotron_h": ["mixer.experts.up_proj", "mixer.experts.down_proj"]}
FAMILIES = (*families.FAMILIES, "olmoe", "qwen2_moe", "glm4_moe", "dots1", "nemotron_h")


def config(family: str) -> Any:
    if family in families.FAMILIES:
        return families.config(family)
    from transformers import Dots1Config, Glm4MoeConfig, NemotronHConfig, OlmoeConfig, Qwen2MoeConfig

    kinds = {
        "olmoe": OlmoeConfig,
        "qwen2_moe": Qwen2MoeConfig,
        "glm4_moe": Glm4MoeConfig,
        "dots1": Dots1Config,
        "nemotron_h": NemotronHConfig,
    }
    fields = families.config("qwen3_moe").to_dict() | {
        "num_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "shared_expert_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "layers_block_type": ["attention", "moe"],
    }
    known = {name: value for name, value in fields.items() if name in kinds[family].__dataclass_fields__}
    dropped = ("model_type", "architectures", "rope_parameters", "layer_types", "transformers_version", "dtype")
    return kinds[family](**{name: value for name, value in known.items() if name not in dropped})


def base(family: str) -> Any:
    torch.manual_seed(0)
    model = causal_lm(config(family), dtype=torch.float64, experts_implementation="eager")
    model.config._attn_implementation = "eager"
    return awaken(model)


def adapted(family: str, **options: Any) -> Any:
    """With random adapters of attention and experts, so that all of them have gradients at once."""
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 12,
        "target_modules": ATTENTION.get(family, ["q_proj", "v_proj"]),
        "target_parameters": MATRICES.get(family, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        "init_lora_weights": False,
    }
    model = base(family)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**settings | options))


def by_expert(name: str, parameter: nn.Parameter, value: Tensor) -> dict[str, Tensor]:
    """`value`, which has the layout of `parameter`, under names that do not depend on where experts are.

    Of stock PEFT, too, whose layouts are spelled out here a second time.
    """
    ownership = ownership_of(parameter)
    if ownership is not None:
        held = zip(ownership.row_ids, ownership.owns, value, strict=True)
        return {f"{name}/{expert}": row.clone() for expert, owned, row in held if owned}
    if "experts" not in name or "shared" in name:
        return {name: value.clone()}
    if "lora_A" in name:
        rank = len(value) // EXPERTS
        rows = [value[expert * rank : (expert + 1) * rank] for expert in range(EXPERTS)]
    elif "lora_B" in name:
        rows = [value[:, expert::EXPERTS] for expert in range(EXPERTS)]
    else:
        rows = list(value)
    return {f"{name}/{expert}": row.clone() for expert, row in enumerate(rows)}


def rows(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if grads else parameter.detach()
        if grads and not parameter.requires_grad:
            assert value is None, f"{name} is frozen and has a gradient"
            continue
        if value is None:  # an expert without tokens, on one process
            value = torch.zeros_like(parameter)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found |= by_expert(name, parameter, value)
    return found
