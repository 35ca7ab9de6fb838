"""Faults of saved adapters, of the kinds that users of other stacks reported, with words that name each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.integrations.transformers.families import EXPERTS

MATRICES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

Tensors = dict[str, Tensor]


def experts_of(tensors: Tensors, matrix: str) -> list[str]:
    return [name for name in tensors if "experts" in name and matrix in name]


def lose_rows(tensors: Tensors) -> None:
    for name in experts_of(tensors, "lora_A"):
        tensors[name][len(tensors[name]) // 8 :] = 0
    for name in experts_of(tensors, "lora_B"):
        tensors[name].view(len(tensors[name]), -1, EXPERTS)[..., 1:] = 0


def freeze(tensors: Tensors) -> None:
    for name in experts_of(tensors, "lora_B"):
        tensors[name].zero_()


def freeze_one(tensors: Tensors) -> None:
    for name in experts_of(tensors, "lora_B"):
        tensors[name].view(len(tensors[name]), -1, EXPERTS)[..., 5] = 0


def order_as_in_a(tensors: Tensors) -> None:
    for name in experts_of(tensors, "lora_B"):
        b = tensors[name]
        tensors[name] = b.view(len(b), -1, EXPERTS).mT.reshape(len(b), -1).contiguous()


def swap_experts(tensors: Tensors) -> None:
    order = [1, 0, *range(2, EXPERTS)]
    for name in experts_of(tensors, "lora_A"):
        tensors[name] = tensors[name].view(EXPERTS, -1)[order].view_as(tensors[name]).contiguous()
    for name in experts_of(tensors, "lora_B"):
        b = tensors[name]
        tensors[name] = b.view(len(b), -1, EXPERTS)[..., order].reshape(b.shape).contiguous()


def repeat_a_rank(tensors: Tensors) -> None:
    for name in experts_of(tensors, "lora_A"):
        half = tensors[name][: len(tensors[name]) // 2]
        tensors[name] = torch.cat([half, half])


def drop_a_matrix(tensors: Tensors) -> None:
    for name in [name for name in tensors if "experts.lora_" in name]:
        del tensors[name]


def break_numbers(tensors: Tensors) -> None:
    tensors[experts_of(tensors, "lora_A")[0]][-1] = float("nan")


def cut_to_a_rank(tensors: Tensors) -> None:
    for name in experts_of(tensors, "lora_A"):
        tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()


def keep_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


WEIGHTS: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "one eighth of the rows": (lose_rows, "gate_up_proj.lora_A is zero in expert(s) 1-7"),
    "frozen while the log says otherwise": (freeze, "lora_B is zero in every expert"),
    "some experts never trained": (freeze_one, "down_proj.lora_B is zero in expert(s) 5"),
    "experts ordered in B as in A": (order_as_in_a, "norms are not those of what the ranks had"),
    "experts in another order": (swap_experts, "experts are in another order than the ranks had"),
    "the rows of rank 0 for all": (repeat_a_rank, "expert(s) 4-7 repeats a matrix of expert(s) 0-3"),
    "a matrix left out": (drop_a_matrix, "layers.0.mlp.experts has 1 adapters for 2 target_parameters"),
    "numbers that are not finite": (break_numbers, "has NaN in expert(s) 7"),
    "the rows of rank 0 alone": (cut_to_a_rank, "has lora_A or lora_B alone in expert(s) 4-7"),
    "names of a wrapped model": (keep_prefix, "does not begin with base_model.model."),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "scaling lost": ({"lora_alpha": 4}, "was 16 in training, and is 1 by adapter_config.json"),
    "another rule of scaling": ({"use_rslora": True}, "was 16 in training, and is 32"),
    "another order of experts, of Unsloth": (
        {"lora_B_layout": "grouped_by_expert"},
        "another order of experts than PEFT",
    ),
    "an older layout": ({"peft_version": "0.18.1"}, "inputs and outputs of experts swapped"),
    "another rank": ({"r": 3}, "which rank 3 does not divide"),
}
