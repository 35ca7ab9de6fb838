"""Find the layers of a model that have experts, and the router of each.

An experts module has an integer `num_experts`, parameters stacked along dimension 0, and is called with (hidden (T, D),
expert ids (T, K), weights (T, K)). Its router is the sibling with one weight row per expert.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.stack import RowsInFiles
from toolkit.experts.sharding.adapt import adapt_experts
from toolkit.experts.sharding.libraries import libraries


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of `model` with experts that can be sharded, by name; experts in known layouts are adapted."""
    adapt_experts(model)
    layers = {}
    for name, module in _layers_with_experts(model).items():
        taken = inspect.signature(module.forward).parameters.values()
        required = [p for p in taken if p.default is p.empty]  # gpt-oss has defaults for two of the three
        takes_three = len(required) <= 3 <= len(taken)
        if isinstance(module, MoE) or "expert_stack" in vars(module) or takes_three:
            layers[name] = module
    return layers


def require_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return `find_experts(model)`.

    Raises:
        UserError: There are none.
    """
    layers = find_experts(model)
    if not layers:
        named = [
            n for n, m in model.named_modules() if "experts" in f"{n.rpartition('.')[2]} {type(m).__name__}".lower()
        ]
        raise UserError(
            f"model: {type(model).__name__} has no experts that can be sharded{f', not {named[-1]!r}' if named else ''}"
            ". Give the module that holds them num_experts, parameters with one row per expert, and a forward of "
            "(hidden, expert ids, weights), or train with accelerator.prepare."
        )
    return layers


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that hold stacked experts, except in our `MoE` layers, by name."""
    return {
        name: module
        for name, module in _layers_with_experts(model).items()
        if not isinstance(module, MoE) and ("expert_stack" in vars(module) or rows_of_router(module) is None)
    }


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the router of each of the `experts_modules` of `model`, by the name of the experts module.

    Raises:
        UserError: An experts module has no sibling that could be its router, or several.
    """
    found = router_candidates(model)
    for name, candidates in found.items():
        if len(candidates) != 1:
            raise UserError(
                f"model: {len(candidates)} modules next to the experts at {name!r} could be their router. "
                "Use a model with one router per MoE layer, with a weight row per expert."
            )
    return {name: router for name, (router,) in found.items()}


def router_candidates(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the siblings of each of the `experts_modules` that have a weight row per expert."""
    found = {}
    for name, experts in experts_modules(model).items():
        siblings: list[Any] = list(model.get_submodule(outside_wrappers(name).rpartition(".")[0]).children())
        children = [m.get_base_layer() if hasattr(m, "get_base_layer") else m for m in siblings]
        found[name] = [m for m in children if rows_of_router(m) == num_experts(experts)]
    return found


def rows_of_router(module: nn.Module) -> int | None:
    """Return the number of experts that `module` chooses from if it is a router, else None."""
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else None


def num_experts(layer: nn.Module) -> int:
    """Return the number of experts of a layer over all ranks."""
    return int(getattr(layer, "expert_stack", layer).num_experts)  # type: ignore[arg-type]


def outside_wrappers(name: str) -> str:
    """Return the name of the outermost wrapper that has the module `name` as its `base_layer`, or `name` itself."""
    return re.sub(r"(\.base_layer)+$", "", name)


def stacked_parameters(layer: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, RowsInFiles]]:
    """Return the parameters of a layer's experts by name, and the form in files of those that are not stacked there."""
    holder = layer.experts if isinstance(layer, MoE) else layer
    parameters = dict(holder.named_parameters(recurse=False))
    in_files: dict[str, RowsInFiles] = dict.fromkeys(parameters, "joined") if "has_split_tables" in vars(holder) else {}
    for library in libraries():
        for name, (parameter, form) in library.adapter_rows(holder).items():
            parameters[name], in_files[name] = parameter, form
    return parameters, in_files


def _layers_with_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return our `MoE` layers, and modules outside of them that hold stacked experts, by name in order of modules."""
    found: dict[str, nn.Module] = {}
    ours: tuple[str, ...] = ()
    for name, module in model.named_modules():
        experts, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
        is_stacked = isinstance(experts, int) and all(p.ndim >= 2 and p.shape[0] == experts for p in parameters)
        if isinstance(module, MoE):
            ours += (f"{name}." if name else "",)
            found[name] = module
        elif not name.startswith(ours) and ("expert_stack" in vars(module) or (parameters and is_stacked)):
            found[name] = module
    return found
