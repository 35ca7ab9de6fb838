"""FSDP2: experts are sharded over the ranks that have the same ones, all other parameters over all ranks.

Ranks can form several sets, each of which has all shards (HSDP): gradients are reduce-scattered within a set, and
averaged between the ranks with the same shard once per optimizer step.

The rows of experts stay with their owners: FSDP2 shards a row along another dimension over the expert data-parallel
group. So placement, migration and optimizer rows are as without FSDP2, on the shard of each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from toolkit.errors import UserError
from toolkit.experts.compat import awaits_all_reduce
from toolkit.experts.layer.stack import ExpertLayer
from toolkit.experts.parallel.collectives import broadcast_from_main, rank, world_size
from toolkit.experts.parallel.groups import ExpertGroups, new_group_of_each
from toolkit.experts.parallel.ownership import ownership_of


def fully_shard_model(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    device: torch.device,
    fsdp_size: int | None = None,
    is_synchronising: Callable[[], bool] = lambda: True,
    autocast: torch.dtype | None = None,
) -> None:
    """Shard all parameters of `model` over the ranks, in place; all go to the device. A collective.

    Experts are sharded over the ranks of a set that have them, see `shard_expert_rows`. Repeated modules in a list are
    gathered one at a time, as are modules with a less common dtype, such as a router in float32; the rest is gathered
    together.

    Args:
        model: The model. Parameters and buffers of rank 0 are broadcast, as under DDP, except experts.
        optimizers: Optimizers that get the new parameters; they must not have stepped.
        device: Device of this rank's shards.
        fsdp_size: Number of neighbouring ranks that hold one set of shards. None: all.
        is_synchronising: Whether the next forward pass is for the last micro-batch of a step.
        autocast: Autocast dtype of the forward pass.

    Raises:
        UserError: An optimizer has state already, or a trainable parameter is in none of `optimizers`.
    """
    before = dict(model.named_parameters())
    _refuse_unfit(optimizers, before)
    dense = [parameter for parameter in before.values() if ownership_of(parameter) is None]
    for tensor in [*dense, *model.buffers()]:
        broadcast_from_main(tensor.detach())
    layers = [module for module in model.modules() if isinstance(module, ExpertLayer)]
    for layer in layers:
        mesh = expert_mesh(layer.expert_stack.groups, device.type, fsdp_size)
        if mesh is not None:
            shard_expert_rows(layer, mesh)
    mesh = _make_mesh(device.type, [_in_sets(range(world_size()), fsdp_size)], dist.group.WORLD)
    # Parameters are gathered in their own type, because autocast casts, as under DDP; and those of the root are
    # resharded, too, so that between two steps the model has the parameters that the optimizer has.
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(),
        "ignored_params": {parameter for parameter in model.parameters() if ownership_of(parameter) is not None},
        "reshard_after_forward": True,
    }
    for unit in [*_units(model, {parameter for parameter in dense if parameter.requires_grad}), model]:
        if unit is model and autocast is not None:  # as Accelerate returns outputs
            options["mp_policy"] = MixedPrecisionPolicy(output_dtype=torch.float32)
        fully_shard(unit, **options)
    after = dict(model.named_parameters())
    sharded = {parameter: after[name] for name, parameter in before.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [sharded.get(parameter, parameter) for parameter in group["params"]]
    if mesh.ndim > 1:
        _average_over_sets(model, is_synchronising, optimizers)
    if autocast is not None:
        model.forward = torch.autocast(device.type, autocast)(model.forward)


def _refuse_unfit(optimizers: Sequence[torch.optim.Optimizer], replaced: Mapping[str, nn.Parameter]) -> None:
    """Raise UserError if an optimizer has state of `replaced` parameters, or a trainable one has no optimizer."""
    held: set[nn.Parameter] = set()
    for optimizer in optimizers:
        held |= {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(optimizer.state.get(parameter) for parameter in replaced.values()):
            raise UserError(
                f"optimizer: {type(optimizer).__name__} has state before its first step, which sharding would lose. "
                'Use one such as AdamW, or dense="ddp".'
            )
    for name, parameter in replaced.items():
        if parameter.requires_grad and parameter not in held:
            raise UserError(
                f"prepare: {name!r} is in no optimizer that was given, so an optimizer made before would not train it. "
                "Give all optimizers, or freeze it."
            )


def shard_expert_rows(layer: ExpertLayer, mesh: DeviceMesh) -> None:
    """Shard each row of the experts of `layer` over `mesh`, in place.

    A row is sharded along its first dimension that the ranks divide. Parameters whose rows have no such dimension, and
    adapters, stay replicated.
    """
    stack, module = layer.expert_stack, layer.module_with_rows
    ranks = mesh.size(mesh.ndim - 1)
    dims: dict[nn.Parameter, int] = {}
    for parameter in stack.parameters.values():
        sizes = list(enumerate(parameter.shape))[1:]
        if (dim := next((dim for dim, size in sizes if size % ranks == 0), None)) is not None:
            dims[parameter] = dim
    names = {parameter: name for name, parameter in module.named_parameters() if parameter in dims}
    if not names:
        return
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=True,
        shard_placement_fn=lambda parameter: Shard(dims[parameter]),
        ignored_params=set(module.parameters()) - names.keys(),
    )
    stack.replace_parameters({parameter: module.get_parameter(name) for parameter, name in names.items()})


def expert_mesh(groups: ExpertGroups, device_type: str, fsdp_size: int | None = None) -> DeviceMesh | None:
    """Make the mesh over which FSDP2 shards the rows of experts: the ranks of a set that have the same. A collective.

    Args:
        groups: The EP groups.
        device_type: Type of the device of the experts.
        fsdp_size: Number of neighbouring ranks that hold one set of shards. None: all.

    Returns:
        The mesh; None if no two ranks of a set have the same experts, or in some sets more than in others.
    """
    across = [[group[place] for group in groups.ep_groups] for place in range(groups.ep_size)]
    grids = [_in_sets(ranks, fsdp_size) for ranks in across]
    sizes = {len(row) for rows in grids for row in rows}
    return _make_mesh(device_type, grids, groups.expert_dp_group) if len(sizes) == 1 and sizes != {1} else None


def _in_sets(ranks: Iterable[int], fsdp_size: int | None) -> list[list[int]]:
    """Return those of `ranks` that are in each set of `fsdp_size` neighbouring ranks."""
    sets: dict[int, list[int]] = {}
    for each in ranks:
        sets.setdefault(each // (fsdp_size or world_size()), []).append(each)
    return list(sets.values())


def _make_mesh(device_type: str, grids: list[list[list[int]]], all_of_grid: dist.ProcessGroup | None) -> DeviceMesh:
    """Make the mesh of the grid that has this rank. A collective.

    Args:
        device_type: Type of the device.
        grids: Ranks with one set of shards per row, each rank in one of the grids, which have the same shape.
        all_of_grid: The ranks of this rank's grid.

    Returns:
        A mesh of one dimension, or for several sets of shards of two: ranks with the same shard, and ranks of the same
        set.
    """
    if len(grids[0]) == 1:
        assert all_of_grid is not None
        return DeviceMesh.from_group(all_of_grid, device_type)
    columns = [list(column) for grid in grids for column in zip(*grid, strict=True)]
    groups = [new_group_of_each(partition) for partition in (columns, chain.from_iterable(grids))]
    return DeviceMesh.from_group(
        [group for group in groups if group is not None],
        device_type,
        mesh=torch.tensor(next(grid for grid in grids if any(rank() in row for row in grid))),
        mesh_dim_names=("replicate", "shard"),
    )


def _average_over_sets(
    model: nn.Module, is_synchronising: Callable[[], bool], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Average gradients over the sets of shards once per optimizer step."""

    @torch.compiler.disable
    def sum_within_sets(module: nn.Module, _: Any) -> None:
        """Leave sums within the sets until the last micro-batch of a step."""
        assert isinstance(module, FSDPModule)
        module.set_requires_all_reduce(is_synchronising())

    model.register_forward_pre_hook(sum_within_sets)
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    def refuse_partial_sums(*_: Any) -> None:
        """Raise UserError for partial sums of a block whose last micro-batch had no backward pass to sum them over the
        sets."""
        for name, module in units:
            if awaits_all_reduce(module):
                raise UserError(
                    f"fsdp_size: {name or type(module).__name__} was used by a micro-batch and not by the last one, "
                    "so its gradients are not averaged over the replicas of shards. Leave fsdp_size out, or skip "
                    "the module in all micro-batches of a step."
                )

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(refuse_partial_sums)


def _units(model: nn.Module, trainable: set[nn.Parameter]) -> list[nn.Module]:
    """The modules within `model` that are gathered one at a time, inner ones first: FSDP2 gathers one type at once."""
    modules = list(model.modules())  # each once: a block that is used twice is one unit
    elements: Counter[torch.dtype] = Counter()
    for parameter in trainable:
        elements[parameter.dtype] += parameter.numel()
    # Break ties by name, because the order of sets differs between ranks.
    usual = max(elements, key=lambda dtype: (elements[dtype], str(dtype)), default=None)
    holders = Counter(parameter for module in modules for parameter in module.parameters(recurse=False))
    wanted = set(_repeated(model))
    for module in modules:
        others = [p for p in module.parameters(recurse=False) if p in trainable and p.dtype != usual]
        if any(holders[parameter] == 1 for parameter in others) and type(module).forward is not nn.Module.forward:
            wanted.add(module)
    return [module for module in reversed(modules) if module in wanted and module is not model]


def _repeated(model: nn.Module) -> Iterable[nn.Module]:
    """The outermost modules in lists: the blocks of a transformer."""
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            yield from module
        else:
            yield from _repeated(module)
