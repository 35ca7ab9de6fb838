"""Shard the experts of any model over ranks: each rank keeps its own rows, and tokens are dispatched to them."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from toolkit.errors import UserError, require_count, require_type
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.parallel.collectives import world_size
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement, initial_placement, with_spare_slots
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.sharding.check import check_experts
from toolkit.experts.sharding.find import require_experts
from toolkit.experts.sharding.fsdp import ExpertShards
from toolkit.progress_bar import progress

PlacementOf = Callable[[str, int, int], ExpertPlacement]
"""`(layer, number of experts, ep_size)` to the layer's initial placement."""


def shard_experts(
    model: nn.Module,
    groups: ExpertGroups | None = None,
    *,
    spare_slots: int = 0,
    placement: InitialPlacement | PlacementOf = "contiguous",
    shards: ExpertShards | None = None,
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
        shards: Shards each layer by FSDP2, as soon as it has this rank's rows, over the ranks that have the same
            experts. Default: these ranks have replicas. Make the optimizer afterwards.

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
    groups = groups or make_expert_groups(math.gcd(world_size(), *(found.num_experts for found in layers.values())))
    placements: dict[str, ExpertPlacement] = {}
    for name, found in layers.items():
        experts, ranks = found.num_experts, groups.ep_size
        if isinstance(placement, str):
            placed = initial_placement(experts, ranks, placement, spare_slots=spare_slots)
        else:
            own = placement(name, experts, ranks)
            require_type(f"placement({name!r}, {experts}, {ranks})", own, ExpertPlacement, "Return an ExpertPlacement")
            placed = with_spare_slots(own, spare_slots)
        placements[name] = found.fit(placed)
    check_experts(model, layers, placements)
    for name, found in progress(layers.items(), "sharding experts"):
        found.shard(placements[name], groups)
        if shards is not None:
            shards.shard(found.module)
    return {name: found.stack for name, found in layers.items()}


def require_sharding(groups: ExpertGroups | None, spare_slots: int, placement: InitialPlacement | PlacementOf) -> None:
    """Raise UserError for arguments of `shard_experts` of another type, and fewer `spare_slots` than 0."""
    require_type("groups", groups, ExpertGroups | None, "Pass the result of make_expert_groups")
    require_count("spare_slots", spare_slots, least=0)
    require_type("placement", placement, (str, Callable), 'Pass "contiguous", "round_robin" or a function of a layer')
