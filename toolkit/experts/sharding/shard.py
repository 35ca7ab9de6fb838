"""Shard the experts of any model over ranks: each rank keeps its own rows, and tokens are dispatched to them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.stack import ExpertStack, RowsInFiles, expert_stacks, hook_state, rows_of
from toolkit.experts.parallel.collectives import broadcast_from_main, world_size
from toolkit.experts.parallel.dense import leave_out_of_ddp
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, initial_placement, with_spare_slots
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.sharding.check import Forward, check_experts
from toolkit.experts.sharding.experts_modules import layers_with_experts, num_experts, outside_wrappers, run_experts
from toolkit.experts.sharding.layouts import adapt_experts, has_split_tables
from toolkit.experts.sharding.libraries import libraries

PlacementOf = Callable[[str, int, int], ExpertPlacement]
"""`(layer, number of experts, ep_size)` to the layer's initial placement."""


def shard_experts(
    model: nn.Module,
    groups: ExpertGroups | None = None,
    *,
    spare_slots: int = 0,
    placement: InitialPlacement | PlacementOf = "contiguous",
) -> dict[str, ExpertStack]:
    """Keep this rank's experts of each layer of `model`, in place. A collective.

    Layers with experts are our `MoE`, and modules of any model with an integer `num_experts` whose own parameters have
    one row per expert, called with (hidden (T, D), expert ids (T, K), weights (T, K)).

    Args:
        model: Experts of rank 0 are broadcast, as DDP does with other parameters. An optimizer that was made before
            stays valid if it has not stepped.
        groups: The ranks that share the experts. Default: as many as divide both the world size and the experts.
        spare_slots: Empty slots on each rank, for replicas.
        placement: "contiguous", "round_robin", or a function of (layer, number of experts, `ep_size`). An experts
            module gets an empty slot on a rank without any of its experts.

    Returns:
        The stack of each layer, by its name.

    Raises:
        UserError: The model has no experts that can be sharded, a placement has another number of experts, experts
            would compute something else, or files cannot be read. The same on every rank, before anything is changed
            except for files.

    Example:
        >>> stacks = shard_experts(model, make_expert_groups(ep_size=2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model = DistributedDataParallel(model)  # leaves the experts alone
    """
    layers = require_experts(model)
    _require_own_rows(model, layers)
    groups = groups or make_expert_groups(math.gcd(world_size(), *map(num_experts, layers.values())))
    placements = {name: _initial(name, module, groups, placement, spare_slots) for name, module in layers.items()}
    for name, module in layers.items():
        if not isinstance(module, MoE) and (forward := check_experts(name, module)) is not module.forward:
            module.forward = forward
    for library in libraries():
        library.stack_adapters(model, layers.values())
    read_by_all: list[str] = []
    for name, module in layers.items():
        read_by_all += [f"{name}.{key}" for key in _keep_rows(module, placements[name], groups)]
    for library in libraries():
        library.after_sharding(layers.values())
    leave_out_of_ddp(model, read_by_all)
    return expert_stacks(model)


def require_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of `model` with experts that can be sharded, by name; experts in known layouts are adapted.

    Raises:
        UserError: There are none.
    """
    adapt_experts(model)
    layers = {name: module for name, module in layers_with_experts(model) if _is_callable_with_three(module)}
    if not layers:
        named = [
            n for n, m in model.named_modules() if "experts" in f"{n.rpartition('.')[2]} {type(m).__name__}".lower()
        ]
        raise UserError(
            f"model: {type(model).__name__} has no experts that can be sharded{f', not {named[-1]!r}' if named else ''}"
            ". Give the module that holds them num_experts, parameters with one row per expert, and a forward of "
            "(hidden, expert ids, weights), as docs/experts/own_layer.md shows, or train with accelerator.prepare."
        )
    return layers


def _is_callable_with_three(module: nn.Module) -> bool:
    if isinstance(module, MoE) or "expert_stack" in vars(module):
        return True
    taken = inspect.signature(module.forward).parameters.values()
    required = [p for p in taken if p.default is p.empty]  # gpt-oss has defaults for two of the three
    return len(required) <= 3 <= len(taken)


def _require_own_rows(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise UserError for experts that are sharded already, or that share parameters with another module."""
    layer_of: dict[int, str] = {}
    own = tuple(f"{outside_wrappers(name)}." if name else "" for name in layers)
    for name, module in model.named_modules():
        if not f"{name}.".startswith(own):
            layer_of |= {id(p): f"{name}.{key}" for key, p in module.named_parameters(recurse=False)}
    for name, module in layers.items():
        stack: ExpertStack | None = vars(module).get("expert_stack")
        parameters = stacked_parameters(module)[0].values()
        is_ours_and_whole = isinstance(module, MoE) and stack is not None and stack.groups.ep_size == 1
        if (stack is not None and not is_ours_and_whole) or any(isinstance(p, DTensor) for p in parameters):
            raise UserError(f"model: the experts at {name!r} are sharded already. Give a model that is not.")
        for parameter in parameters:
            first = layer_of.setdefault(id(parameter), name)
            if first != name:
                raise UserError(
                    f"model: the experts at {name!r} share a parameter with {first!r}, and each rank would keep a part "
                    "of it. Use one module in both places, or parameters for each."
                )


def stacked_parameters(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, RowsInFiles]]:
    """Return the parameters of a layer's experts by name, and the form in files of those that are not stacked there."""
    holder = module.experts if isinstance(module, MoE) else module
    parameters = dict(holder.named_parameters(recurse=False))
    in_files: dict[str, RowsInFiles] = dict.fromkeys(parameters, "joined") if has_split_tables(holder) else {}
    for library in libraries():
        for name, (parameter, form) in library.adapter_rows(holder).items():
            parameters[name], in_files[name] = parameter, form
    return parameters, in_files


def _initial(
    name: str, module: nn.Module, groups: ExpertGroups, placement: InitialPlacement | PlacementOf, spare_slots: int
) -> ExpertPlacement:
    experts = num_experts(module)
    if isinstance(placement, str):
        place = initial_placement(experts, groups.ep_size, placement, spare_slots=spare_slots)
    else:
        place = with_spare_slots(placement(name, experts, groups.ep_size), spare_slots)
    if place.num_experts != experts:
        raise UserError(f"placement: {place.num_experts} experts for {name!r}, which has {experts}. Place each once.")
    if isinstance(module, MoE):
        return place
    # A rank without a slot could not call the module, and would be missing in the backward pass of the all-to-all.
    return ExpertPlacement(tuple(row or (EMPTY_ROW,) for row in place.slots))


def _keep_rows(module: nn.Module, place: ExpertPlacement, groups: ExpertGroups) -> list[str]:
    """Leave a layer the rows of this rank's slots; return the frozen parameters that each rank read from files."""
    slots = place.slots[groups.ep_rank]
    read = {name: rows for library in libraries() for name, rows in library.read_rows(module, slots).items()}
    frozen = [name for name in read if not module.get_parameter(name).requires_grad]
    parameters, in_files = stacked_parameters(module)
    for name, parameter in parameters.items():
        if name not in read:
            broadcast_from_main(parameter.data)
        rows = read[name] if name in read else rows_of(parameter.data, slots)
        if rows.device == parameter.device:
            parameter.data = rows
        else:
            parameters[name] = nn.Parameter(rows, requires_grad=False)
            setattr(module, name, parameters[name])
    stack = module.expert_stack = ExpertStack(parameters, place, groups, in_files=in_files)  # type: ignore[assignment]
    if not isinstance(module, MoE):
        _dispatch_tokens(module, stack)
        hook_state(module)
    return frozen


def _dispatch_tokens(module: nn.Module, stack: ExpertStack) -> None:
    """Wrap the forward of an experts module: it gets the rows dispatched to its slots, each with weight 1."""
    signature = inspect.signature(module.forward)
    three = signature.replace(parameters=list(signature.parameters.values())[:3])
    # No closure: `copy.deepcopy` gives a copied module its own forward, which has it and its stack.
    module.forward = partial(_forward, module, stack, module.forward, three)


def _forward(
    module: nn.Module, stack: ExpertStack, compute: Forward, signature: inspect.Signature, *args: Any, **kwargs: Any
) -> Tensor:
    # A further argument raises TypeError here: ranks that compute these tokens would not have it.
    hidden, ids_TK, weights_TK = signature.bind(*args, **kwargs).arguments.values()
    if ids_TK.is_floating_point():
        ids_TK, weights_TK = weights_TK, ids_TK
    x_TD = hidden.reshape(-1, hidden.shape[-1])
    return run_experts(module, stack, partial(_compute, module, stack.slots, compute), x_TD, ids_TK, weights_TK).view(
        hidden.shape
    )


def _compute(module: nn.Module, slots: int, compute: Forward, *rows: Tensor) -> Tensor:
    """Compute rows of this rank's slots. Only meanwhile is `num_experts` the number of rows of the parameters."""
    experts = module.num_experts
    module.num_experts = slots  # type: ignore[assignment]
    try:
        return compute(*rows)
    finally:
        module.num_experts = experts
