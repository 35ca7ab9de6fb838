"""`accelerator.prepare` for a model with expert-parallel parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.ddp import (
    end_after_gloo_threads,
    keep_group_longer_than,
    leave_out_of_ddp,
)
from toolkit.experts.parallel.optimizer_rows import check_optimizer
from toolkit.experts.parallel.ownership import is_owned, owned
from toolkit.experts.parallel.parallel_options import Dense
from toolkit.experts.sharding.fsdp import fully_shard_model
from toolkit.integrations.accelerate.compat import mark_as_prepared


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    more_optimizers: Sequence[torch.optim.Optimizer] = (),
    dense: Dense = "ddp",
    fsdp_size: int | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare a model whose experts are sharded, without DDP's broadcast and averaging of them.

    Args:
        accelerator: Prepares `model` and `optimizer`.
        model: Buffers that modules list as `constant_buffers` are not broadcast either.
        optimizer: The optimizer of the experts.
        more_optimizers: Have further parameters of `model`, and get their FSDP2 shards. Prepare them yourself.
        dense: "ddp" replicates non-expert parameters, "fsdp2" shards them.
        fsdp_size: Neighbouring ranks over which FSDP2 shards. Default: all.

    Returns:
        The prepared model and optimizer.

    Raises:
        UserError: As `check_optimizer` does; also fp16 with sharded parameters, FSDP2 with experts that every rank has,
            or a model in DDP.
        ValueError: A sharded expert parameter is on the root module, see `leave_out_of_ddp`.
    """
    if any(isinstance(module, DistributedDataParallel | nn.DataParallel) for module in model.modules()):
        raise UserError("model: is wrapped in DistributedDataParallel already. Pass the model inside, `model.module`.")
    check_optimizer(model, optimizer)
    leave_out_of_ddp(model)
    experts = owned(model.parameters())
    is_parallel = accelerator.num_processes > 1
    if accelerator.mixed_precision == "fp16" and (experts or (dense == "fsdp2" and is_parallel)):
        raise UserError(
            "mixed_precision: 'fp16' looks for overflow on each rank only, and ranks have different parameters. "
            "Use 'bf16', or ep_size=1 and dense='ddp' (data_parallel)."
        )
    if is_parallel:
        end_after_gloo_threads()
    # The CPU of a process has its number in Accelerate, so that torch would copy all parameters to it.
    moves = accelerator.device_placement and accelerator.device.type != "cpu"
    if dense == "fsdp2" and is_parallel:
        on_host = {stack.parameters[name] for stack in expert_stacks(model).values() for name in stack.computed_on}
        for parameter in experts:  # FSDP2 moves its parameters
            if parameter not in on_host and accelerator.device.type != "cpu":
                parameter.data = parameter.data.to(accelerator.device)
        fully_shard_model(
            model,
            [optimizer, *more_optimizers],
            device=accelerator.device,
            fsdp_size=fsdp_size,
            is_synchronising=lambda: accelerator.sync_gradients,
            autocast=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
        )
        mark_as_prepared(model)  # or Accelerate would wrap it in DDP, and move it
    elif is_parallel and experts and all(is_owned(p) for p in model.parameters() if p.requires_grad):
        # DDP raises for a model without parameters to average, and nothing else of it is needed.
        model = accelerator.prepare_model(model, device_placement=moves, evaluation_mode=True)
        return model, accelerator.prepare(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer, device_placement=[moves, moves])
    if isinstance(model, DistributedDataParallel):
        keep_group_longer_than(model)
    return model, optimizer
