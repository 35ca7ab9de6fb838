"""Parameters of a mixture by what they belong to, router, experts or the rest: for an optimizer, and for freezing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from torch import nn

from toolkit.errors import UserError, require_choice
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.sharding.experts_modules import outside_wrappers, routers
from toolkit.experts.sharding.shard import require_experts

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
    """Parameter groups for any torch optimizer, each with its own settings and its `name`.

        groups = parameter_groups(
            model, experts={"lr": 1e-4, "weight_decay": 0.0}, rest={"lr": 2e-5}, freeze="router"
        )
        optimizer = torch.optim.AdamW(groups)

    `router`, `experts`, `rest`: settings of the optimizer for that part, such as lr and weight_decay; what is left out
    is the optimizer's own default. Adapters belong to the part that they adapt; shared experts to the rest.
    `freeze`: parts that are not to learn, by their names: `requires_grad` of their parameters is set to False, and they
    are in no group. What was frozen before stays so, and is left out as well.

    Call it before `prepare`, which follows the experts wherever they go. Raises UserError for a model without experts
    that can be spread or without a router beside them, for an unknown part, and for settings of a part that is frozen.
    """
    settings = {"router": router, "experts": experts, "rest": rest}
    frozen: set[Part] = {freeze} if isinstance(freeze, str) else set(freeze)
    for part in frozen:
        require_choice("freeze", part, Part)
        if settings[part]:
            raise UserError(
                f"{part}={dict(settings[part] or {})} has no effect, because freeze has {part!r}: drop one."
            )
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
    """The part of parameters by the beginning of their names, those of wrappers around a module included."""
    layers = require_experts(model)
    ours = {id(module.router) for module in layers.values() if isinstance(module, MoE)}
    holders = {id(module.experts if isinstance(module, MoE) else module) for module in layers.values()}
    if any(not isinstance(module, MoE) for module in layers.values()):
        ours |= {id(module) for module in routers(model).values()}
    return {
        f"{outside_wrappers(name)}.": "router" if id(module) in ours else "experts"
        for name, module in model.named_modules()
        if id(module) in ours | holders
    }
