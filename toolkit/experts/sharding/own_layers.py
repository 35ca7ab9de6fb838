"""Layers of one's own, given the interface of `toolkit.experts.sharding.foreign` where they have another one.

Each function is called in the layer's `__init__`, whose `forward` then calls what it returns with hidden (T, D), expert
ids (T, K) and weights (T, K). See `docs/experts/own_layer.md`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.grouped_mm import padded_places
from toolkit.experts.sharding.foreign import in_order_of_slots


def stack_experts(experts: Iterable[nn.Module]) -> StackedExperts:
    """Return one module with the parameters of `experts`, stacked: in place of a loop over a `ModuleList`.

    Args:
        experts: Modules of one kind, each called with rows (N, D) and returning as many.

    Raises:
        UserError: They differ in more than the values of their parameters, share some, or have buffers.
    """
    return StackedExperts(list(experts))


def sorted_experts(module: Any) -> Any:
    """Return `module`, which is called with rows sorted by expert and the number of rows of each, adapted in place.

    Args:
        module: Has `num_experts`, by which its forward takes its tables apart, and parameters with a row per expert; or
            tables with the rows of all experts one after another, which get a dimension more and are saved without it.
    """
    experts, tables = int(module.num_experts), list(module.parameters(recurse=False))
    if all(table.ndim == 2 and len(table) > experts and len(table) % experts == 0 for table in tables):
        for table in tables:
            table.data = table.data.view(experts, -1, table.shape[1])
        module.is_fused_part = True
    module.forward = partial(in_order_of_slots, _sorted, module)
    return module


def batched_experts(module: Any) -> Any:
    """Return `module`, which is called with an equal batch for each expert, (E, C, D), adapted in place.

    Args:
        module: Has `num_experts` and parameters with a row per expert, such as operands of `einsum` or `bmm`. Batches
            are filled up with zeros, and what comes of these is left out.
    """
    module.forward = partial(in_order_of_slots, equal_batches, module)
    return module


class StackedExperts(nn.Module):
    """Experts of one kind with stacked parameters, computed together by `torch.func.vmap`. See `stack_experts`.

    Parameters are named as those of one expert, with `_` for each dot. A state dict of the `ModuleList` is loaded, too.
    """

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        first = experts[0]
        parameters = [parameter for expert in experts for parameter in expert.parameters()]
        for expert in experts:
            if str(expert) != str(first) or any(True for _ in expert.buffers()):
                raise UserError(
                    f"experts {first} and {expert} cannot be stacked: use modules of one kind, without buffers."
                )
        if len(parameters) != len(experts) * len(list(first.parameters())) or len(set(parameters)) < len(parameters):
            raise UserError("experts share parameters, and each is to have its own: use a module for each.")
        self.num_experts = len(experts)
        self._names = {name.replace(".", "_"): name for name, _ in first.named_parameters()}
        for stacked, name in self._names.items():
            rows = [expert.get_parameter(name) for expert in experts]
            self.register_parameter(
                stacked, nn.Parameter(torch.stack([row.detach() for row in rows]), requires_grad=rows[0].requires_grad)
            )
        self._one = [copy.deepcopy(first).to("meta")]  # in a list, or its parameters would be this module's
        self.register_load_state_dict_pre_hook(_stack_state)

    def forward(
        self, hidden: Float[Tensor, "T D"], expert_ids: Int[Tensor, "T K"], weights: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        """Returns each row's outputs of its experts, weighted and added up."""
        return in_order_of_slots(equal_batches, self, hidden, expert_ids, weights)

    def compute_batches(self, rows_SCD: Float[Tensor, "S C D"]) -> Float[Tensor, "S C D"]:
        """Returns the outputs of each slot's expert for its batch of rows."""
        one = self._one[0].train(self.training)
        parameters = {name: getattr(self, stacked) for stacked, name in self._names.items()}
        call = torch.func.vmap(partial(torch.func.functional_call, one), randomness="different")
        return call(parameters, rows_SCD)


def _stack_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    names: dict[str, str] = module._names  # type: ignore[assignment]
    for stacked, name in names.items():
        rows: list[Tensor] = []
        while (row := state.pop(f"{prefix}{len(rows)}.{name}", None)) is not None:
            rows.append(row)
        if rows:
            state[prefix + stacked] = torch.stack(rows)


def _sorted(module: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Tensor:
    return type(module).forward(module, rows_ND, rows_per_slot)


def equal_batches(
    experts: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]
) -> Float[Tensor, "N D"]:
    """(N, D): `experts` computed on rows in order of slots, each slot's filled up with zeros to the largest.

    The host waits for the device in each forward, to learn the largest.
    """
    place_N, most = padded_places(rows_per_slot, len(rows_ND))
    filled = rows_ND.new_zeros(len(rows_per_slot) * most, rows_ND.shape[1]).index_copy(0, place_N, rows_ND)
    batches = filled.view(len(rows_per_slot), most, rows_ND.shape[1])
    compute = getattr(experts, "compute_batches", None) or partial(type(experts).forward, experts)
    return compute(batches).reshape(filled.shape)[place_N]
