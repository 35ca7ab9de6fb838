"""FSDP2 of experts: ranks that have the same experts hold a shard of each.

A row stays with its owner: FSDP2 shards it along another dimension, over the expert data-parallel group. So placement,
migration and optimizer rows are as without FSDP2, on the shard of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from toolkit.experts.layer.stack import ExpertLayer
from toolkit.experts.parallel.collectives import rank, world_size
from toolkit.experts.parallel.groups import ExpertGroups, new_group_of_each


class ExpertShards:
    """Shards experts over the ranks that have the same ones, by FSDP2.

    Each row of an expert parameter is sharded along its first dimension that the number of these ranks divides. Rows
    without such a dimension, adapters, quantized experts and experts with CPU offload stay replicated. In mixed
    precision, so do all experts of a layer with such rows, which FSDP2 then only casts.

    Args:
        dp_shard_size: Number of neighbouring ranks that hold one set of shards (HSDP). Default: all ranks.
        mp_policy: Precision of the gathered parameters and of the reduction of gradients. Default: the parameters'.
        dtype: Type of the shards of trainable parameters. Default: the parameters'.
        reshard_after_forward: Whether to gather the parameters again for the backward pass, which saves memory.

    Example:
        >>> stacks = shard_experts(model, make_expert_groups(ep_size=2), shards=ExpertShards())
        >>> rows = {p for stack in stacks.values() for p in stack.parameters.values()}
        >>> fully_shard(model, ignored_params=rows, reshard_after_forward=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> sync = ExpertSync(model, optimizer)
    """

    def __init__(
        self,
        *,
        dp_shard_size: int | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ):
        policy = mp_policy or MixedPrecisionPolicy()
        # Inputs are routing weights, too, which stay in the precision of the router.
        self.mp_policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
        self.dp_shard_size, self.dtype, self.reshard_after_forward = dp_shard_size, dtype, reshard_after_forward
        self._meshes: dict[ExpertGroups | None, DeviceMesh | None] = {}

    def shard(self, layer: nn.Module) -> None:
        """Shard the experts of `layer`, which have this rank's rows. A collective."""
        assert isinstance(layer, ExpertLayer)
        stack, module = layer.expert_stack, layer.module_with_rows
        names = {parameter: name for name, parameter in module.named_parameters(recurse=False)}
        if stack.computed_on or not all(parameter.is_floating_point() for parameter in names):
            return
        mesh = self._mesh_of(stack.groups, stack.device.type)
        dims = {} if mesh is None else _dims(names, mesh.shape[-1])
        if self.mp_policy.param_dtype is not None and len(dims) < len(names):
            mesh = self._mesh_of(None, stack.device.type)
            dims = dict.fromkeys(names, 0)
        if not dims:
            return
        for parameter in dims:
            if parameter.requires_grad and self.dtype is not None:
                parameter.data = parameter.data.to(self.dtype)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=self.reshard_after_forward,
            shard_placement_fn=lambda parameter: Shard(dims[parameter]),
            mp_policy=self.mp_policy,
            ignored_params=set(module.parameters()) - dims.keys(),
        )
        stack.replace_parameters({parameter: module.get_parameter(names[parameter]) for parameter in dims})
        for parameter in dims:
            parameter.data = parameter.data.new_empty(0)  # an optimizer may hold it

    def _mesh_of(self, groups: ExpertGroups | None, device_type: str) -> DeviceMesh | None:
        """Return the mesh of the ranks with the experts of this rank, or of this rank only, where FSDP2 only casts."""
        if groups not in self._meshes:
            if groups is not None:
                self._meshes[groups] = _mesh_of(groups, device_type, self.dp_shard_size)
            else:
                alone = new_group_of_each([[each] for each in range(world_size())], alone=True)
                assert alone is not None
                self._meshes[groups] = DeviceMesh.from_group(alone, device_type)
        return self._meshes[groups]


def _dims(parameters: Iterable[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """Return the dimension of each of `parameters` that is sharded over `ranks`: FSDP2 shards only the first unevenly,
    and gathers parameters of one type."""
    found: dict[nn.Parameter, int] = {}
    for parameter in parameters:
        dim = next((dim for dim in range(1, parameter.ndim) if parameter.shape[dim] % ranks == 0), None)
        is_alike = not found or parameter.dtype == next(iter(found)).dtype
        if dim is not None and is_alike:
            found[parameter] = dim
    return found


def _mesh_of(groups: ExpertGroups, device_type: str, dp_shard_size: int | None) -> DeviceMesh | None:
    """Make the mesh of the ranks that have the same experts as this rank. A collective.

    Returns:
        A mesh of one dimension, or with several sets of shards of two: ranks with the same shard, and ranks of a set.
        None if a set has no two ranks with the same experts, or more in some sets than in others.
    """
    size = dp_shard_size or world_size()
    grids: list[list[list[int]]] = []
    """Ranks with the same experts, by set."""
    for place in range(groups.ep_size):
        sets: dict[int, list[int]] = {}
        for each in (group[place] for group in groups.ep_groups):
            sets.setdefault(each // size, []).append(each)
        grids.append(list(sets.values()))
    if {len(ranks) for grid in grids for ranks in grid} != {len(grids[0][0])} or len(grids[0][0]) == 1:
        return None
    if len(grids[0]) == 1:
        assert groups.expert_dp_group is not None
        return DeviceMesh.from_group(groups.expert_dp_group, device_type)
    replicas = new_group_of_each(list(ranks) for grid in grids for ranks in zip(*grid, strict=True))
    shards = new_group_of_each(ranks for grid in grids for ranks in grid)
    assert replicas is not None
    assert shards is not None
    here = next(grid for grid in grids if any(rank() in ranks for ranks in grid))
    return DeviceMesh.from_group(
        [replicas, shards], device_type, mesh=torch.tensor(here), mesh_dim_names=("dp_replicate", "dp_shard")
    )
