"""Spreading the experts of any model over ranks: each keeps the rows of its own, and tokens are brought to them.

Experts are found by what they are: our `MoE` layers, and foreign modules as `toolkit.hosts.foreign` knows them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.hosts.foreign import compute_rows, has_stacked_parameters
from toolkit.moe.layer import MoE
from toolkit.moe.load.routing_log import Choices
from toolkit.moe.recompute import recomputing
from toolkit.moe.stack import ExpertStack, expert_stacks
from toolkit.parallel.groups import ExpertGroups
from toolkit.parallel.ownership import EMPTY_ROW
from toolkit.placement.placement import ExpertPlacement, InitialPlacement, initial_placement, with_spare_slots

PlacementOf = Callable[[str, int, int], ExpertPlacement]
"""`(layer, number of experts, ep_size)` to where the layer's experts live at first."""


def spread_experts(
    model: nn.Module,
    groups: ExpertGroups,
    *,
    spare_slots: int = 0,
    placement: InitialPlacement | PlacementOf = "contiguous",
) -> dict[str, ExpertStack]:
    """Keep this rank's experts of each layer of `model`, in place; returns all layers' stacks, by name.

    All ranks hold the same `model`, and an optimizer made before or after stays valid if it has not stepped.
    `placement`: experts in contiguous blocks, round-robin, or where a function of the layer says. Raises UserError for a
    placement that does not fit a layer.
    """
    for name, module in find_experts(model).items():
        experts, ranks = num_experts(module), groups.ep_size
        if isinstance(placement, str):
            place = initial_placement(experts, ranks, placement, spare_slots=spare_slots)
        else:
            place = with_spare_slots(placement(name, experts, ranks), spare_slots)
        if place.num_experts != experts:
            raise UserError(f"placement of {place.num_experts} experts for {name!r}, which has {experts}.")
        holder = module.experts if isinstance(module, MoE) else module
        parameters = dict(holder.named_parameters(recurse=False))
        for parameter in parameters.values():
            parameter.data = _rows(parameter.data, list(place.slots[groups.ep_rank]))
        module.expert_stack = ExpertStack(parameters, place, groups)  # type: ignore[assignment]
        if not isinstance(module, MoE):
            _bring_tokens(module, module.expert_stack)  # type: ignore[arg-type]
    return expert_stacks(model)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose experts can be spread, by name: our `MoE`, and foreign modules of stacked experts."""
    layers: dict[str, nn.Module] = {}
    ours: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            ours.append(f"{name}." if name else "")
            layers[name] = module
        elif not any(name.startswith(prefix) for prefix in ours) and _holds_stacked_experts(module):
            layers[name] = module
    return layers


def _holds_stacked_experts(module: nn.Module) -> bool:
    taken = inspect.signature(module.forward).parameters.values()
    required = [p for p in taken if p.default is p.empty]  # gpt-oss has defaults for two of the three
    return has_stacked_parameters(module) and len(required) <= 3 <= len(taken)


def num_experts(module: nn.Module) -> int:
    """Of one layer, before it is spread."""
    return module.expert_stack.num_experts if isinstance(module, MoE) else int(module.num_experts)  # type: ignore[arg-type]


def _rows(stacked: Tensor, experts: list[int]) -> Tensor:
    """The rows of `experts`, zeros for an empty slot."""
    index = torch.tensor([max(expert, 0) for expert in experts], dtype=torch.int64, device=stacked.device)
    rows = stacked.index_select(0, index)
    for slot, expert in enumerate(experts):
        if expert == EMPTY_ROW:
            rows[slot].zero_()
    return rows


def _bring_tokens(module: nn.Module, stack: ExpertStack) -> None:
    """Let the forward of a foreign module see the rows for its slots, one slot per row, with weight 1."""
    compute, signature = module.forward, inspect.signature(module.forward)
    module.num_experts = stack.slots  # type: ignore[assignment]

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden, ids_TK, weights_TK = signature.bind(*args, **kwargs).args
        x_TD = hidden.reshape(-1, hidden.shape[-1])
        rows, plan = stack.dispatcher.dispatch(x_TD, ids_TK)
        rows = compute_rows(compute, rows, plan.rows_per_slot)
        outputs = stack.dispatcher.combine(rows, plan, weights_TK).view(hidden.shape)
        if not recomputing():
            training = module.training and torch.is_grad_enabled()
            stack.record(plan, Choices(ids_TK, None), hidden, outputs, training=training)
        return outputs

    module.forward = forward
