"""Parameters of an MoE model by part: router, experts and the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from torch import nn

from toolkit.errors import require_choice
from toolkit.experts.sharding.find import require_experts, routers
from toolkit.experts.sharding.found import outside_wrappers

Part = Literal["router", "experts", "rest"]
PARTS: tuple[Part, ...] = get_args(Part)


def parameter_groups(
    model: nn.Module,
    *,
    router: Mapping[str, Any] | None = None,
    experts: Mapping[str, Any] | None = None,
    rest: Mapping[str, Any] | None = None,
    freeze: Part | Collection[Part] = (),
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer, each with its own settings and its `name`.

    Call it before `prepare`. Adapters belong to the part that they adapt, shared experts to the rest. Parameters that
    are frozen already are left out.

    Args:
        model: A model with experts that can be sharded.
        router: Optimizer settings of the routers, such as `lr` and `weight_decay`. Default: the optimizer's.
        experts: Optimizer settings of the experts.
        rest: Optimizer settings of the other parameters.
        freeze: Parts whose `requires_grad` is set to False, and which are in no group.

    Raises:
        UserError: An unknown part, or a model without experts that can be sharded or without their routers.

    Example:
        >>> groups = parameter_groups(model, experts={"lr": 1e-4}, rest={"lr": 2e-5}, freeze="router")
        >>> optimizer = torch.optim.AdamW(groups)
    """
    settings = {"router": router, "experts": experts, "rest": rest}
    frozen: set[Part] = {freeze} if isinstance(freeze, str) else set(freeze)
    for part in frozen:
        require_choice("freeze", part, Part)
    parameters: dict[Part, list[nn.Parameter]] = {part: [] for part in PARTS}
    part_of = _parts(model)
    for name, parameter in model.named_parameters():
        own: Part = next((part_of[prefix] for prefix in part_of if name.startswith(prefix)), "rest")
        if own in frozen:
            parameter.requires_grad_(False)
        elif parameter.requires_grad:
            parameters[own].append(parameter)
    return [{"name": part, "params": found, **(settings[part] or {})} for part, found in parameters.items() if found]


def _parts(model: nn.Module) -> dict[str, Part]:
    """Return the part of parameters by the prefix of their names, which includes wrappers around a module."""
    layers = require_experts(model)
    part_of: dict[str, Part] = {f"{found.path}.": "experts" for found in layers.values()}
    router_ids = {id(each) for each in (*routers(model).values(), *(found.router for found in layers.values()))}
    return part_of | {
        f"{outside_wrappers(name)}.": "router" for name, module in model.named_modules() if id(module) in router_ids
    }
