"""`accelerator.prepare` for a model with owned parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.dense import (
    end_after_gloo_threads,
    keep_group_longer_than,
    leave_out_of_ddp,
    refuse_meta,
)
from toolkit.experts.parallel.fsdp import fully_shard_dense
from toolkit.experts.parallel.optimizer_rows import refuse_coupled_rows, refuse_strangers
from toolkit.experts.parallel.ownership import is_owned, owned, ownership_of
from toolkit.experts.parallel.parallel_options import DDPOptions, Dense
from toolkit.integrations.accelerate.compat import mark_as_prepared


def ddp_options(config: DDPOptions) -> DistributedDataParallelKwargs:
    """Returns what an Accelerator takes among its `kwargs_handlers`."""
    return DistributedDataParallelKwargs(
        **config.model_dump() | {"comm_hook": DDPCommunicationHookType(config.comm_hook)}
    )


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    more_optimizers: Sequence[torch.optim.Optimizer] = (),
    dense: Dense = "ddp",
    fsdp_size: int | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`accelerator.prepare`, with owned parameters kept out of DDP's broadcast and averaging, and `constant_buffers`
    out of its broadcast.

    `dense="fsdp2"` shards all other parameters over the ranks, or with `fsdp_size` over each set of so many neighbours.
    `more_optimizers` have further parameters of `model`, and are given the sharded ones; preparing them is left to you.
    Raises UserError for parameters on the meta device, for fp16 with owned parameters, for an optimizer whose
    statistics span their rows, and for FSDP2 with experts that every rank replicates.
    Raises ValueError for an owned parameter that sits on the root module, see `leave_out_of_ddp`.
    """
    refuse_meta(model)
    leave_out_of_ddp(model)
    experts = owned(model.parameters())
    is_parallel = accelerator.num_processes > 1
    if accelerator.mixed_precision == "fp16" and (experts or (dense == "fsdp2" and is_parallel)):
        raise UserError(
            "mixed_precision='fp16' cannot be used where ranks own experts or shards, because each would judge "
            "overflow by its own: use mixed_precision='bf16', or ep_size=1 and dense='ddp' (data_parallel)."
        )
    refuse_strangers(model, optimizer)
    refuse_coupled_rows(optimizer)
    if is_parallel:
        end_after_gloo_threads()
    # The CPU of a process has its number in Accelerate, so that torch would copy all parameters to it.
    moves = accelerator.device_placement and accelerator.device.type != "cpu"
    if dense == "fsdp2" and is_parallel:
        if not experts and any(ownership_of(p) for p in model.parameters()):
            raise UserError(
                "dense_parallel='fsdp2' leaves experts with their owners, and with ep_size=1 every process has all: "
                "use a larger ep_size, or DDP."
            )
        on_host = {stack.parameters[name] for stack in expert_stacks(model).values() for name in stack.computed_on}
        for parameter in experts:  # FSDP2 moves what it shards
            if parameter not in on_host and accelerator.device.type != "cpu":
                parameter.data = parameter.data.to(accelerator.device)
        fully_shard_dense(
            model,
            [optimizer, *more_optimizers],
            device=accelerator.device,
            fsdp_size=fsdp_size,
            ignored=experts,
            is_synchronising=lambda: accelerator.sync_gradients,
            autocast=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
        )
        mark_as_prepared(model)  # or Accelerate would wrap it in DDP, and move it
    elif is_parallel and experts and all(is_owned(p) for p in model.parameters() if p.requires_grad):
        # DDP refuses a model of which it would average nothing, and nothing else of it is needed.
        model = accelerator.prepare_model(model, device_placement=moves, evaluation_mode=True)
        return model, accelerator.prepare(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer, device_placement=[moves, moves])
    if isinstance(model, DistributedDataParallel):
        keep_group_longer_than(model)
    return model, optimizer
