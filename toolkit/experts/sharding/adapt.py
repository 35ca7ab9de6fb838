"""Adapters for experts of another layout: they get a forward of hidden (T, D), expert ids (T, K) and weights (T, K).

A layer calls `stack_experts`, `sorted_experts` or `batched_experts` in its `__init__`: see `docs/experts/moe.md`.
`adapt_experts` finds two layouts of transformers by their parts: experts that take an equal batch each and are weighted
at their input (Llama 4), and tables with the rows of all experts one after another (DBRX). Names in state dicts stay.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.grouped_mm import ZeroEmptySlots, in_equal_batches
from toolkit.experts.sharding.call import in_order_of_slots

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def stack_experts(experts: Iterable[nn.Module]) -> StackedExperts:
    """Stack the parameters of `experts` in one module, instead of a loop over a `ModuleList`.

    Args:
        experts: Modules of one kind, called with rows (N, D) for an output (N, D).

    Returns:
        A module called with (hidden, expert ids, weights).

    Raises:
        UserError: The modules differ in more than the values of their parameters, share some, or have buffers.
    """
    return StackedExperts(list(experts))


def unstack_experts(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the experts in a state dict the names and shapes that they have in a `ModuleList`.

    Args:
        model: The model of the state dict, with the result of `stack_experts` instead of each list.
        state: A state dict with all experts, such as `whole_state_dict(model)`, which is empty on ranks other than 0.

    Returns:
        A state dict for the model with lists.
    """
    unstacked = dict(state)
    for prefix, module in model.named_modules():
        if isinstance(module, StackedExperts) and unstacked:
            for stacked, name in module.names.items():
                rows = unstacked.pop(f"{prefix}.{stacked}" if prefix else stacked)
                unstacked |= {
                    f"{prefix}.{expert}.{name}".removeprefix("."): row for expert, row in enumerate(rows.unbind())
                }
    return unstacked


def sorted_experts(module: Any) -> Any:
    """Adapt a module called with rows sorted by expert and the number of rows of each expert, in place.

    Args:
        module: Has `num_experts`, by which its forward splits its tables, and parameters with a row per expert; or
            tables (E * F, D) with the rows of all experts one after another, which become (E, F, D) and are saved flat.

    Returns:
        `module`.
    """
    experts, tables = int(module.num_experts), list(module.parameters(recurse=False))
    if all(table.ndim == 2 and len(table) > experts and len(table) % experts == 0 for table in tables):
        _split_tables(module, tables)
    module.forward = partial(in_order_of_slots, type(module).forward, module)
    return module


def batched_experts(module: Any) -> Any:
    """Adapt a module called with an equal batch for each expert, (E, rows, D), in place.

    Args:
        module: Has `num_experts` and parameters with a row per expert, such as operands of `einsum` or `bmm`. Batches
            are filled up with copies of rows, whose outputs are dropped.

    Returns:
        `module`.
    """
    module.forward = partial(in_order_of_slots, _in_batches, module)
    return module


def _in_batches(module: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Tensor:
    return in_equal_batches(partial(type(module).forward, module), rows_ND, rows_per_slot)


class StackedExperts(nn.Module):
    """Experts of one kind with stacked parameters, computed together by `torch.func.vmap`: see `stack_experts`.

    Parameters have the names of one expert's, with `_` for each dot. State dicts of the `ModuleList` can be loaded.
    """

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        first = experts[0]
        parameters = {parameter for expert in experts for parameter in expert.parameters()}
        is_same = all(str(expert) == str(first) and not list(expert.buffers()) for expert in experts)
        if not is_same or len(parameters) != len(experts) * len(list(first.parameters())):
            raise UserError(
                f"experts: modules such as {first} differ, have buffers or share parameters. "
                "Use modules of one kind without buffers, each with its own parameters."
            )
        self.num_experts = len(experts)
        self.names = {name.replace(".", "_"): name for name, _ in first.named_parameters()}
        for stacked, name in self.names.items():
            rows = [expert.get_parameter(name) for expert in experts]
            self.register_parameter(
                stacked, nn.Parameter(torch.stack([row.detach() for row in rows]), requires_grad=rows[0].requires_grad)
            )
        self._one = [copy.deepcopy(first).to("meta")]  # in a list, or its parameters would be this module's
        self.register_load_state_dict_pre_hook(_stack_state)

    def forward(
        self, hidden: Float[Tensor, "T D"], expert_ids: Int[Tensor, "T K"], weights: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        """Return the weighted sum of each token's expert outputs, shape (T, D)."""
        return in_order_of_slots(StackedExperts.compute, self, hidden, expert_ids, weights)  # type: ignore[arg-type]

    def compute(self, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
        """Return the outputs (N, D) of the experts for rows in order of slots."""
        one = self._one[0].train(self.training)
        ends_S = rows_per_slot.cumsum(0, dtype=torch.int32)
        # A slot without rows computes copies of others' rows, and an empty one with weights of zero: NaN, perhaps.
        parameters = {name: ZeroEmptySlots.apply(getattr(self, key), ends_S) for key, name in self.names.items()}
        call = torch.func.vmap(partial(torch.func.functional_call, one), randomness="different")
        return in_equal_batches(partial(call, parameters), rows_ND, rows_per_slot)


def _stack_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    names: dict[str, str] = module.names  # type: ignore[assignment]
    for stacked, name in names.items():
        rows: list[Tensor] = []
        while (row := state.pop(f"{prefix}{len(rows)}.{name}", None)) is not None:
            rows.append(row)
        if rows:
            state[prefix + stacked] = torch.stack(rows)


# --- layouts of transformers ----------------------------------------------------------------------------------------


def adapt_experts(model: nn.Module) -> None:
    """Give the experts of `model` in known layouts a forward of (hidden, expert ids, weights), in place."""
    module: Any
    for module in list(model.modules()):
        experts = getattr(module, "experts", None)
        if (
            isinstance(experts, nn.Module)
            and {name for name, _ in module.named_children()} == {"experts", "router", "shared_expert"}
            and {"gate_up_proj", "down_proj"} == {name for name, _ in experts.named_parameters()}
            and hasattr(module, "top_k")
            and len(inspect.signature(experts.forward).parameters) == 1
        ):
            batched_experts(experts)
            module.forward = partial(_scale_inputs, module)
        elif has_fused_tables(module):
            (part,) = module.children()
            part.num_experts = module.num_experts
            _split_tables(part, list(part.parameters()))
            part.forward = partial(in_order_of_slots, _one_by_one, part)
            module.forward = partial(_call_part, module)


def _scale_inputs(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of Llama 4's MoE layer with the rows of chosen experts only; others have a score of 0."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores_TE, logits_TE = block.router(x_TD)
    scores_TK, ids_TK = scores_TE.topk(block.top_k, dim=1)
    rows_ND = (x_TD.unsqueeze(1) * scores_TK.unsqueeze(2)).flatten(0, 1)
    y_ND = block.experts(rows_ND, ids_TK.reshape(-1, 1), rows_ND.new_ones(len(rows_ND), 1))
    return block.shared_expert(x_TD) + y_ND.view(*ids_TK.shape, -1).sum(1), logits_TE


def has_fused_tables(experts: Any) -> bool:
    """Whether the rows of all experts are one after another, in the tables of the only child of `experts`."""
    number, width = getattr(experts, "num_experts", None), getattr(experts, "ffn_hidden_size", None)
    parts = list(experts.children())
    if not isinstance(number, int) or not isinstance(width, int) or len(parts) != 1:
        return False
    tables, own = list(experts.parameters()), list(parts[0].parameters(recurse=False))
    arguments = [len(inspect.signature(module.forward).parameters) for module in (experts, parts[0])]
    is_flat = all(table.ndim == 2 and len(table) == number * width for table in tables)
    return arguments == [3, 1 + len(own)] and len(tables) == len(own) and is_flat


def _split_tables(module: Any, tables: list[nn.Parameter]) -> None:
    """Give flat `tables` (E * F, D) a dimension for the experts, as (E, F, D)."""
    for table in tables:
        table.data = table.data.view(module.num_experts, -1, table.shape[1])
    module.has_split_tables = True


def _call_part(experts: Any, *args: Tensor) -> Tensor:
    (part,) = experts.children()
    return part(*args)


def _one_by_one(part: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Tensor:
    """Return the part's own forward of (rows, one expert's tables), called expert by expert. With a host sync."""
    tables = list(part.parameters())
    by_slot = enumerate(rows_ND.split(rows_per_slot.tolist()))
    return torch.cat([type(part).forward(part, rows, *(table[slot] for table in tables)) for slot, rows in by_slot])
