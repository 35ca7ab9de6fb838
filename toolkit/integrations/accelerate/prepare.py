"""`accelerator.prepare` for a model with expert-parallel parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.layer.stack import ExpertLayer, ExpertStack, only_names_are_read
from toolkit.experts.parallel.collectives import broadcast_from_main
from toolkit.experts.parallel.ddp import (
    end_after_gloo_threads,
    keep_group_longer_than,
    leave_out_of_ddp,
)
from toolkit.experts.parallel.optimizer_rows import check_optimizer, unwrapped
from toolkit.experts.parallel.ownership import is_owned, ownership_of
from toolkit.experts.sharding.fsdp import ExpertShards


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise UserError for an accelerator that shards the model in a way that sharded experts do not support."""
    parallel = accelerator.parallelism_config
    others = ("tp", "cp", "sp")
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or (
        parallel is not None and any(getattr(parallel, f"{name}_size") > 1 for name in others)
    ):
        raise UserError(
            "accelerator: DeepSpeed, Megatron-LM, and tensor, context and sequence parallelism shard the model "
            "themselves. Use DDP or FSDP2."
        )
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin = accelerator.state.fsdp_plugin
    for name, value, is_supported, remedy in (
        ("fsdp_version", plugin.fsdp_version, plugin.fsdp_version == 2, "Set it to 2"),
        ("mixed_precision", "'fp16'", accelerator.mixed_precision != "fp16", "Use 'bf16'"),
        ("fsdp_offload_params", True, not isinstance(plugin.cpu_offload, CPUOffloadPolicy), "Leave it out"),
        (
            "fsdp_activation_checkpointing",
            True,
            not plugin.activation_checkpointing,
            "Call model.gradient_checkpointing_enable(), or use recompute of make_moe",
        ),
    ):
        if not is_supported:
            raise UserError(f"{name}: {value} is not supported for sharded experts. {remedy}.")


def prepare(accelerator: Accelerator, model: nn.Module, *optimizers: Optimizer) -> tuple[Any, ...]:
    """Prepare a model whose experts are sharded, without DDP's or FSDP's treatment of them as replicated parameters.

    Under FSDP2, experts are sharded over the ranks that have the same ones, see `ExpertShards`, and Accelerate
    shards all other parameters.

    Args:
        accelerator: Prepares `model` and `optimizers`.
        model: Buffers that modules list as `constant_buffers` are not broadcast either.
        *optimizers: The optimizers of the model's parameters. The first has the experts. Without any, the model can
            only be evaluated.

    Returns:
        The prepared model and optimizers.

    Raises:
        UserError: As `check_optimizer` does; also fp16 with sharded parameters, or a model in DDP.
        ValueError: Under DDP, a sharded expert parameter is on the root module, see `leave_out_of_ddp`.
    """
    if any(isinstance(module, DistributedDataParallel | nn.DataParallel) for module in model.modules()):
        raise UserError("model: is wrapped in DistributedDataParallel already. Pass the model inside, `model.module`.")
    if optimizers:
        check_optimizer(model, optimizers[0])
    if accelerator.num_processes > 1:
        end_after_gloo_threads()
    return strategy_of(accelerator, model, optimizers).prepare(model, optimizers)


@dataclass
class Replicate:
    """All ranks have the parameters other than experts: DDP on several processes."""

    accelerator: Accelerator
    shards: ExpertShards | None = None
    """Shards experts over the ranks that have the same ones."""

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[Any, ...]:
        """Return the prepared model and optimizers."""
        accelerator = self.accelerator
        experts = leave_out_of_ddp(model) if optimizers else []
        if experts and accelerator.mixed_precision == "fp16":
            raise UserError(
                "mixed_precision: 'fp16' looks for overflow on each rank only, and ranks have different parameters. "
                "Use 'bf16', or ep_size=1."
            )
        # The CPU of a process has its number in Accelerate, so that torch would copy all parameters to it.
        moves = accelerator.device_placement and accelerator.device.type != "cpu"
        has_only_experts = experts and all(is_owned(p) for p in model.parameters() if p.requires_grad)
        if not optimizers or has_only_experts:
            # DDP raises for a model without parameters to average, and nothing else of it is needed.
            model = accelerator.prepare_model(model, device_placement=moves, evaluation_mode=True)
            return model, *map(accelerator.prepare, optimizers)
        model, *prepared = accelerator.prepare(model, *optimizers, device_placement=[moves] * (1 + len(optimizers)))
        if isinstance(model, DistributedDataParallel):
            keep_group_longer_than(model)
        return model, *prepared


class FullyShard(Replicate):
    """Ranks have shards of all parameters: FSDP2, by Accelerate's plugin."""

    shards: ExpertShards

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[Any, ...]:
        """Shard experts that are not yet sharded, and have Accelerate shard the other parameters."""
        accelerator, shards = self.accelerator, self.shards
        plugin, parallel = accelerator.state.fsdp_plugin, accelerator.parallelism_config
        before = dict(model.named_parameters())
        for tensor in [*(p for p in before.values() if ownership_of(p) is None), *model.buffers()]:
            broadcast_from_main(tensor.detach())  # of rank 0, as under DDP
        experts = Experts.of(model)
        for layer in experts.layers.values():
            if isinstance(layer, ExpertLayer) and not isinstance(layer.module_with_rows, FSDPModule):
                shards.shard(layer)
        on_host = {stack.parameters[name] for stack in experts.stacks.values() for name in stack.computed_on}
        for parameter in model.parameters():
            if ownership_of(parameter) is not None and not isinstance(parameter, DTensor) and parameter not in on_host:
                if shards.dtype is not None and parameter.requires_grad:
                    parameter.data = parameter.data.to(shards.dtype)
                if accelerator.device.type != "cpu":
                    parameter.data = parameter.data.to(accelerator.device)
        if accelerator.mixed_precision == "no":  # or Accelerate casts all parameters to float32
            mesh = accelerator.torch_device_mesh
            for module in _with_other_types(model):
                fully_shard(module, mesh=None if mesh is None else mesh[tuple(parallel.fsdp_dim_names)])
        replace_parameters(optimizers, before, model)
        ignored = plugin.ignored_modules or []
        if isinstance(ignored, str):
            ignored = [module for name, module in model.named_modules() if re.fullmatch(plugin.ignored_modules, name)]
        plugin.ignored_modules = [*ignored, *_with_plain_experts(model)]
        plugin.cpu_ram_efficient_loading = False  # all ranks have rank 0's parameters
        with only_names_are_read(model):
            model, *prepared = accelerator.prepare(model, *optimizers)
        plugin.ignored_modules = ignored
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
                # The kernels of several tensors take no replicas, such as adapters, together with shards.
                group |= {name: False for name in ("fused", "foreach") if group.get(name)}
        model.register_forward_hook(_reshard_after_evaluation)
        return model, *prepared


def strategy_of(accelerator: Accelerator, model: nn.Module, optimizers: Sequence[Optimizer]) -> Replicate:
    """Return how `accelerator` distributes a model that `optimizers` train: a `FullyShard` under FSDP2.

    Raises UserError for optimizers that FSDP2 does not support.
    """
    if not accelerator.is_fsdp2 or not optimizers:
        return Replicate(accelerator)
    refuse_unfit(optimizers, dict(model.named_parameters()))
    plugin, parallel = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    shards = ExpertShards(
        dp_shard_size=parallel.dp_shard_size if parallel is not None and parallel.dp_shard_enabled else None,
        mp_policy=plugin.mixed_precision_policy,
        dtype=None if accelerator.mixed_precision == "no" else torch.float32,  # as of the other parameters
        reshard_after_forward=plugin.reshard_after_forward,
    )
    return FullyShard(accelerator, shards)


def refuse_unfit(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise UserError if an optimizer has state of `parameters`, or a trainable one has no optimizer."""
    held: set[torch.Tensor] = set()
    for optimizer in optimizers:
        held |= {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(optimizer.state.get(parameter) for parameter in parameters.values()):
            raise UserError(
                f"optimizer: {type(optimizer).__name__} has state before its first step, which sharding would "
                "lose. Use one such as AdamW, or DDP."
            )
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter not in held:
            raise UserError(
                f"prepare: {name!r} is in no optimizer that was given, so an optimizer made before would not train "
                "it. Give all optimizers, or freeze it."
            )


def replace_parameters(optimizers: Sequence[Optimizer], before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Give `optimizers` the parameters that `model` has now instead of those `before`, by their names."""
    shards = {parameter: model.get_parameter(name) for name, parameter in before.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]


def fit_optimizers(
    optimizers: Sequence[Optimizer],
    before: Mapping[str, nn.Parameter],
    model: nn.Module,
    stacks: Mapping[str, ExpertStack],
) -> None:
    """Give `optimizers` the parameters of `stacks` instead of those `before`, and cut the states that they were made
    with to this rank's rows."""
    replace_parameters(optimizers, before, model)
    for stack in stacks.values():
        for parameter in stack.parameters.values():
            size = stack.num_experts * parameter.shape[1:].numel()
            for state in (unwrapped(optimizer).state.get(parameter, {}) for optimizer in optimizers):
                for key, value in state.items():
                    is_made = isinstance(value, torch.Tensor) and value.ndim
                    if is_made and (value.shape[1:] == parameter.shape[1:] or value.numel() == size):
                        state[key] = value.flatten()[:1].expand(parameter.shape).clone()


def _reshard_after_evaluation(model: nn.Module, *_: object) -> None:
    """Give `model` the parameters that the optimizer has, which FSDP2 does after a backward pass only."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _with_other_types(model: nn.Module) -> list[nn.Module]:
    """Return the modules with trainable parameters of another type than most: FSDP2 gathers parameters of one type."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad and ownership_of(parameter) is None:
            elements[parameter.dtype] += parameter.numel()
    # Break ties by name, because the order of sets differs between ranks.
    usual = max(elements, key=lambda dtype: (elements[dtype], str(dtype)), default=None)
    return [
        module
        for module in model.modules()
        if not isinstance(module, FSDPModule)
        and any(
            p.requires_grad and p.dtype != usual and ownership_of(p) is None for p in module.parameters(recurse=False)
        )
    ]


def _with_plain_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have expert parameters without shards, such as adapters."""
    return [
        module
        for module in model.modules()
        if any(ownership_of(p) is not None for p in module.parameters(recurse=False))
        and all(ownership_of(p) is not None for p in module.parameters())
    ]
