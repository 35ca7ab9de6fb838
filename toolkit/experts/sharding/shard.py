"""Shard the experts of any model over ranks: each rank keeps its own rows, and tokens are dispatched to them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from toolkit.errors import UserError, require_count, require_type
from toolkit.experts.compat import exclude_from_ddp
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.stack import ExpertStack, hook_state_dict, rows_of
from toolkit.experts.parallel.collectives import broadcast_from_main, world_size
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, initial_placement, with_spare_slots
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.sharding.call import Forward, run_experts
from toolkit.experts.sharding.check import check_experts
from toolkit.experts.sharding.find import num_experts, require_experts, stacked_parameters
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
        UserError: An argument has another type, a parameter is on the meta device, the model has no experts that can be
            sharded, a placement has another number of experts, experts would compute something else, or files cannot be
            read. The same on every rank, before anything is changed except for files.

    Example:
        >>> stacks = shard_experts(model, make_expert_groups(ep_size=2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model = DistributedDataParallel(model)  # leaves the experts alone
    """
    require_type("model", model, nn.Module, "Pass the model whose experts are sharded")
    require_sharding(groups, spare_slots, placement)
    if meta := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise UserError(f"model: parameter {meta[0]!r} is on the meta device. Load its values first.")
    layers = require_experts(model)
    groups = groups or make_expert_groups(math.gcd(world_size(), *map(num_experts, layers.values())))
    placements = {}
    for name, module in layers.items():
        placements[name] = _placed(name, num_experts(module), groups.ep_size, placement, spare_slots)
        if not isinstance(module, MoE):
            # A rank without a slot could not call the module, and would lack the backward pass of the all-to-all.
            slots = placements[name].slots
            placements[name] = ExpertPlacement(tuple(row or (EMPTY_ROW,) for row in slots))
    for name, forward in check_experts(model, layers, placements).items():
        layers[name].forward = forward
    for library in libraries():
        library.stack_adapters(model, layers.values())
    read_by_all: list[str] = []
    for name, module in layers.items():
        read_by_all += [f"{name}.{key}" for key in _keep_rows(module, placements[name], groups)]
    for library in libraries():
        library.after_sharding(layers.values())
    exclude_from_ddp(model, read_by_all)
    return {name: module.expert_stack for name, module in layers.items()}  # type: ignore[misc]


def require_sharding(groups: ExpertGroups | None, spare_slots: int, placement: InitialPlacement | PlacementOf) -> None:
    """Raise UserError for arguments of `shard_experts` of another type, and fewer `spare_slots` than 0."""
    require_type("groups", groups, ExpertGroups | None, "Pass the result of make_expert_groups")
    require_count("spare_slots", spare_slots, least=0)
    require_type("placement", placement, (str, Callable), 'Pass "contiguous", "round_robin" or a function of a layer')


def _placed(
    name: str, experts: int, ranks: int, placement: InitialPlacement | PlacementOf, spare_slots: int
) -> ExpertPlacement:
    if isinstance(placement, str):
        return initial_placement(experts, ranks, placement, spare_slots=spare_slots)
    placed = placement(name, experts, ranks)
    require_type(f"placement({name!r}, {experts}, {ranks})", placed, ExpertPlacement, "Return an ExpertPlacement")
    return with_spare_slots(placed, spare_slots)


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
        signature = inspect.signature(module.forward)
        three = signature.replace(parameters=list(signature.parameters.values())[:3])
        # No closure: `copy.deepcopy` gives a copied module its own forward, which has it and its stack.
        module.forward = partial(_dispatch, module, stack, module.forward, three)
        hook_state_dict(module)
    return frozen


def _dispatch(
    module: nn.Module, stack: ExpertStack, compute: Forward, signature: inspect.Signature, *args: Any, **kwargs: Any
) -> Tensor:
    """Run the forward of a sharded experts module. It computes rows dispatched to its slots, each with weight 1."""
    # A further argument raises TypeError here: ranks that compute these tokens would not have it.
    hidden, ids_TK, weights_TK = signature.bind(*args, **kwargs).arguments.values()
    if ids_TK.is_floating_point():
        ids_TK, weights_TK = weights_TK, ids_TK
    x_TD = hidden.reshape(-1, hidden.shape[-1])
    y_TD = run_experts(module, stack, partial(_compute, module, stack.slots, compute), x_TD, ids_TK, weights_TK)
    return y_TD.view(hidden.shape)


def _compute(module: nn.Module, slots: int, compute: Forward, *rows: Tensor) -> Tensor:
    """Compute rows of this rank's slots. Only meanwhile is `num_experts` the number of rows of the parameters."""
    experts = module.num_experts
    module.num_experts = slots  # type: ignore[assignment]
    try:
        return compute(*rows)
    finally:
        module.num_experts = experts
