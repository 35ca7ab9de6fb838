"""Experts that are stacked but called otherwise, given the interface of `toolkit.experts.sharding.foreign` in
place.

Known are experts that take an equal batch for each expert and are weighted at their input (Llama 4), and tables with
the rows of all experts one after another, whose rows are computed by a part (DBRX). No family is named: a mixture is
known by its parts. State dicts keep their names. With either the host waits for the device in each forward.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toolkit.experts.sharding.foreign import in_order_of_slots
from toolkit.experts.sharding.libraries import libraries
from toolkit.experts.sharding.own_layers import equal_batches

PAGE = "docs/experts/own_layer.md"
"""Says how a layer is rewritten."""


def adapt_experts(model: nn.Module) -> None:
    """Give the experts of `model` that are known by their parts a forward of (hidden, expert ids, weights)."""
    module: Any
    for module in list(model.modules()):
        if _is_scaled_at_input(module):
            module.experts.forward = partial(in_order_of_slots, equal_batches, module.experts)
            module.forward = partial(_scale_inputs, module)
        elif has_fused_tables(module):
            _unfuse(module)


def _arguments(module: Any) -> int:
    return len(inspect.signature(module.forward).parameters)


# --- an equal batch for each expert, weighted at the input -----------------------------------------------------------


def _is_scaled_at_input(block: Any) -> bool:
    experts = getattr(block, "experts", None)
    return (
        isinstance(experts, nn.Module)
        and {name for name, _ in block.named_children()} == {"experts", "router", "shared_expert"}
        and {"gate_up_proj", "down_proj"} == {name for name, _ in experts.named_parameters()}
        and hasattr(block, "top_k")
        and _arguments(experts) == 1
    )


def _scale_inputs(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of Llama 4's mixture with the rows of chosen experts alone; others have a score of 0."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores_TE, logits_TE = block.router(x_TD)
    scores_TK, ids_TK = scores_TE.topk(block.top_k, dim=1)
    rows_ND = (x_TD.unsqueeze(1) * scores_TK.unsqueeze(2)).flatten(0, 1)
    y_ND = block.experts(rows_ND, ids_TK.reshape(-1, 1), rows_ND.new_ones(len(rows_ND), 1))
    return block.shared_expert(x_TD) + y_ND.view(*ids_TK.shape, -1).sum(1), logits_TE


# --- the rows of all experts one after another -----------------------------------------------------------------------


def has_fused_tables(experts: Any) -> bool:
    """Whether the rows of all experts are one after another, in the tables of the only child of `experts`."""
    number, width = getattr(experts, "num_experts", None), getattr(experts, "ffn_hidden_size", None)
    parts = list(experts.children())
    if not isinstance(number, int) or not isinstance(width, int) or len(parts) != 1 or _arguments(experts) != 3:
        return False
    tables = list(experts.parameters())
    return len(tables) == len(list(parts[0].parameters(recurse=False))) == _arguments(parts[0]) - 1 and all(
        table.ndim == 2 and len(table) == number * width for table in tables
    )


def _unfuse(experts: Any) -> None:
    (part,) = experts.children()
    for table in part.parameters():
        table.data = table.data.view(experts.num_experts, -1, table.shape[1])
    part.num_experts, part.is_fused_part = experts.num_experts, True
    part.forward = partial(in_order_of_slots, _one_by_one, part)
    experts.forward = partial(_call_part, experts)


def is_fused_part(experts: nn.Module) -> bool:
    """Returns whether files have the rows of these experts one after another, in tables that were unfused here."""
    return vars(experts).get("is_fused_part", False)


def _call_part(experts: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    (part,) = experts.children()
    return part(hidden, expert_ids, weights)


def _one_by_one(part: Any, rows_ND: Float[Tensor, "N D"], rows_per_slot: Int[Tensor, " S"]) -> Tensor:
    """The part's own forward, of (rows, one expert's tables), for rows in order of slots: called expert by expert.

    The host waits for the device in each forward, to learn how many rows each expert has.
    """
    tables = list(part.parameters())
    by_slot = enumerate(rows_ND.split(rows_per_slot.tolist()))
    return torch.cat([type(part).forward(part, rows, *(table[slot] for table in tables)) for slot, rows in by_slot])


# --- what cannot be adapted ------------------------------------------------------------------------------------------


def why_no_experts(model: nn.Module) -> str:
    """Return a sentence on a model without experts that can be spread: what was found, and what to do instead."""
    for library in libraries():
        if reason := library.why_no_experts(model):
            return reason
    found = [each for each in model.named_modules() if _experts_named(each[1])] + lists_of_experts(model)
    kind = type(model).__name__
    if not found:
        return (
            f"model {kind} has no experts that are stacked tensors: give the module that holds them num_experts, "
            f"and a forward of (hidden, expert ids, weights), see {PAGE}."
        )
    name, module = found[-1]  # the innermost
    rows = sorted({len(p) for p in module.parameters(recurse=False) if p.ndim > 1})
    if isinstance(module, nn.ModuleDict | nn.ModuleList):
        reason = "are modules of their own, not rows of stacked parameters"
    elif len(rows) > 1:
        reason = f"have parameters of {' and '.join(map(str, rows))} rows"
    else:
        reason = "are not called with (hidden, expert ids, weights)"
    return (
        f"model {kind}: the experts at {name!r} ({type(module).__name__}) {reason}, so they cannot be spread over "
        f"ranks: rewrite the layer ({PAGE}), or call accelerator.prepare instead of ExpertParallel, which trains them "
        "under DDP or FSDP."
    )


def lists_of_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the lists of modules of one kind that are called experts, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.endswith("experts") and len({type(each) for each in module}) == 1
    ]


def _experts_named(module: nn.Module) -> bool:
    """Whether a module calls itself experts, or counts those that it has parameters of."""
    kind = type(module).__name__
    counts = hasattr(module, "num_experts") and any(True for _ in module.parameters(recurse=False))
    return counts or "Experts" in kind or "MoE" in kind
