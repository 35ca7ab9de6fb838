"""Find the layers of a model that have experts, and the router of each. Nothing is changed.

An experts module has an integer `num_experts`, parameters stacked along dimension 0, and is called with (hidden (T, D),
expert ids (T, K), weights (T, K)). Its router is the sibling with one weight row per expert.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.sharding.adapt import known_layouts
from toolkit.experts.sharding.found import FoundExperts, FoundMoE, is_stacked
from toolkit.experts.sharding.libraries import libraries


def find_experts(model: nn.Module) -> dict[str, FoundExperts]:
    """Return the experts of `model` that can be sharded, by the name of their layer, in order of modules."""
    return {name: found for name, found in _layers_with_experts(model).items() if found.takes_ids}


def require_experts(model: nn.Module) -> dict[str, FoundExperts]:
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
    return {name: found.module for name, found in stacked_experts(model).items()}


def stacked_experts(model: nn.Module) -> dict[str, FoundExperts]:
    """Return the experts of the `experts_modules` of `model`."""
    return {
        name: found
        for name, found in _layers_with_experts(model).items()
        if not isinstance(found, FoundMoE) and (found.is_sharded or rows_of_router(found.module) is None)
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
    candidates = {}
    for name, found in stacked_experts(model).items():
        siblings: list[Any] = list(model.get_submodule(found.path.rpartition(".")[0]).children())
        children = [m.get_base_layer() if hasattr(m, "get_base_layer") else m for m in siblings]
        candidates[name] = [m for m in children if rows_of_router(m) == found.num_experts]
    return candidates


def rows_of_router(module: nn.Module) -> int | None:
    """Return the number of experts that `module` chooses from if it is a router, else None."""
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _layers_with_experts(model: nn.Module) -> dict[str, FoundExperts]:
    """Return our `MoE` layers, and modules outside of them that hold stacked experts, by name in order of modules."""
    layers: dict[str, FoundExperts] = {}
    ours: tuple[str, ...] = ()
    known = known_layouts(model)
    adapters = {experts: found for library in libraries() for experts, found in library.find_adapters(model).items()}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            ours += (f"{name}." if name else "",)
            layers[name] = FoundMoE(name, module, adapters.get(module.experts))
        elif not name.startswith(ours) and (module in known or is_stacked(module)):
            layers[name] = FoundExperts(name, module, known.get(module), adapters.get(module))
    return layers
