"""Experts of other layouts, called with hidden (T, D), expert ids (T, K) and weights (T, K).

A layer calls `stack_experts`, `sorted_experts` or `batched_experts` in its `__init__`: see `docs/experts/moe.md`.
`known_layouts` finds two layouts of transformers by their parts: experts that take an equal batch each and are weighted
at their input (Llama 4), and tables with the rows of all experts one after another (DBRX). Names in state dicts stay.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.grouped_mm import ZeroEmptySlots, in_equal_batches
from toolkit.experts.layer.rows_in_files import stacked as rows_of_tables
from toolkit.experts.sharding.layout import Layout, SortsRows, extend
from toolkit.experts.sharding.sharded_experts import forward_arguments

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
    extend(module, SortedRows)
    if all(table.ndim == 2 and len(table) > experts and len(table) % experts == 0 for table in tables):
        module.rows_in_files = "joined"
        for table in tables:
            table.data = rows_of_tables(table.data, "joined", experts)
    return module


def batched_experts(module: Any) -> Any:
    """Adapt a module called with an equal batch for each expert, (E, rows, D), in place.

    Args:
        module: Has `num_experts` and parameters with a row per expert, such as operands of `einsum` or `bmm`. Batches
            are filled up with copies of rows, whose outputs are dropped.

    Returns:
        `module`.
    """
    extend(module, EqualBatches)
    return module


class SortedRows(SortsRows):
    """The layout of `sorted_experts`."""

    def compute_slots(self, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
        return self.forward_of_slots(len(rows_per_slot), rows_ND, rows_per_slot)


class EqualBatches(SortsRows):
    """The layout of `batched_experts`."""

    def compute_slots(self, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
        return in_equal_batches(partial(self.forward_of_slots, len(rows_per_slot)), rows_ND, rows_per_slot)


class StackedExperts(SortsRows):
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

    def compute_slots(self, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
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


@dataclass(frozen=True)
class KnownLayout:
    """An experts module that cannot be called with ids as it is."""

    num_experts: int
    layout: type[Layout]
    block: nn.Module
    """Calls the experts."""
    block_type: type[nn.Module]
    """Is mixed into the class of `block`, and calls experts of this layout."""


def known_layouts(model: nn.Module) -> dict[nn.Module, KnownLayout]:
    """Return the experts modules of `model` in layouts of Llama 4 and DBRX."""
    found: dict[nn.Module, KnownLayout] = {}
    block: Any
    for block in model.modules():
        experts: Any = getattr(block, "experts", None)
        if isinstance(experts, nn.Module) and _weighs_inputs(block, experts):
            found[experts] = KnownLayout(block.num_experts, EqualBatches, block, WeighsInputs)
        elif _has_fused_tables(block):
            (part,) = block.children()
            found[part] = KnownLayout(block.num_experts, FusedTables, block, CallsItsPart)
    return found


def _weighs_inputs(block: nn.Module, experts: nn.Module) -> bool:
    return (
        {name for name, _ in block.named_children()} == {"experts", "router", "shared_expert"}
        and {"gate_up_proj", "down_proj"} == {name for name, _ in experts.named_parameters()}
        and hasattr(block, "top_k")
        and len(forward_arguments(experts)) == 1
    )


class WeighsInputs(nn.Module):
    """Mixed into the class of Llama 4's MoE layer, which weighs the inputs of all experts, most of them by 0."""

    router: Any
    experts: Any
    shared_expert: Any
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Call experts with the rows that chose them."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_TE, logits_TE = self.router(x_TD)
        scores_TK, ids_TK = scores_TE.topk(self.top_k, dim=1)
        rows_ND = (x_TD.unsqueeze(1) * scores_TK.unsqueeze(2)).flatten(0, 1)
        y_ND = self.experts(rows_ND, ids_TK.reshape(-1, 1), rows_ND.new_ones(len(rows_ND), 1))
        return self.shared_expert(x_TD) + y_ND.view(*ids_TK.shape, -1).sum(1), logits_TE


def _has_fused_tables(experts: Any) -> bool:
    """Whether the rows of all experts are one after another, in the tables of the only child of `experts`."""
    number, width = getattr(experts, "num_experts", None), getattr(experts, "ffn_hidden_size", None)
    parts = list(experts.children())
    if not isinstance(number, int) or not isinstance(width, int) or len(parts) != 1:
        return False
    tables, own = list(experts.parameters()), list(parts[0].parameters(recurse=False))
    arguments = [len(forward_arguments(module)) for module in (experts, parts[0])]
    is_flat = all(table.ndim == 2 and len(table) == number * width for table in tables)
    return arguments == [3, 1 + len(own)] and len(tables) == len(own) and is_flat


class FusedTables(SortsRows):
    """The part of DBRX's experts with their tables (E * F, D). Its own forward takes rows and one expert's tables."""

    rows_in_files = "joined"

    def compute_slots(self, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Float[Tensor, "N D"]:
        """Call the own forward expert by expert. With a host sync."""
        tables, slots = list(self.parameters()), len(rows_per_slot)
        by_slot = enumerate(rows_ND.split(rows_per_slot.tolist()))
        return torch.cat(
            [self.forward_of_slots(slots, rows, *(table[slot] for table in tables)) for slot, rows in by_slot]
        )


class CallsItsPart(nn.Module):
    """Mixed into the class of DBRX's experts around their tables."""

    def forward(self, *args: Tensor) -> Tensor:
        (part,) = self.children()
        return part(*args)
