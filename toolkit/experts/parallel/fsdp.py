"""FSDP2 for the non-expert parameters; experts stay with their owners.

Ranks can form several sets, each of which has all shards (HSDP): gradients are reduce-scattered within a set, and
averaged between the ranks with the same shard once per optimizer step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from toolkit.errors import UserError
from toolkit.experts.compat import awaits_all_reduce
from toolkit.experts.parallel.collectives import broadcast_from_main, world_size
from toolkit.experts.parallel.groups import new_group_of_each


def fully_shard_dense(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    device: torch.device,
    fsdp_size: int | None = None,
    ignored: Iterable[Tensor],
    is_synchronising: Callable[[], bool] = lambda: True,
    autocast: torch.dtype | None = None,
) -> None:
    """Shard all parameters of `model` but `ignored` over the ranks, in place; all go to the device. A collective.

    Repeated modules in a list are gathered one at a time, as are modules with a less common dtype, such as a router in
    float32; the rest is gathered together.

    Args:
        model: The model. Parameters and buffers of rank 0 are broadcast, as under DDP, except `ignored`.
        optimizers: Optimizers that get the new parameters; they must not have stepped.
        device: Device of this rank's shards and of the ignored parameters.
        fsdp_size: Number of neighbouring ranks that hold one set of shards. None: all.
        ignored: Parameters that are not sharded.
        is_synchronising: Whether the next forward pass is for the last micro-batch of a step.
        autocast: Autocast dtype of the forward pass.

    Raises:
        UserError: An optimizer has state already, or a trainable parameter is in none of `optimizers`.
    """
    ignored = set(ignored)
    before = {name: parameter for name, parameter in model.named_parameters() if parameter not in ignored}
    _refuse_unfit(optimizers, before)
    for tensor in [*before.values(), *model.buffers()]:
        broadcast_from_main(tensor.detach())
    mesh = _make_mesh(device.type, fsdp_size)
    # Parameters are gathered in their own type, because autocast casts, as under DDP; and those of the root are
    # resharded, too, so that between two steps the model has the parameters that the optimizer has.
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(),
        "ignored_params": ignored,
        "reshard_after_forward": True,
    }
    for unit in [*_units(model, {parameter for parameter in before.values() if parameter.requires_grad}), model]:
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


def _make_mesh(device_type: str, fsdp_size: int | None) -> DeviceMesh:
    """Make a mesh of one dimension, or for several sets of shards of two: ranks with the same shard, and ranks of the
    same set."""
    world = world_size()
    if fsdp_size in (None, world):
        return init_device_mesh(device_type, (world,))
    assert fsdp_size is not None
    ranks = torch.arange(world).view(-1, fsdp_size)
    groups = [new_group_of_each(partition.tolist()) for partition in (ranks.T, ranks)]
    return DeviceMesh.from_group(
        [group for group in groups if group is not None],
        device_type,
        mesh=ranks,
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
