"""`accelerator.prepare` for a model with owned parameters."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.compat import exclude_from_ddp, holders_of_process_group
from toolkit.errors import UserError
from toolkit.experts.parallel.fsdp import fully_shard_dense
from toolkit.experts.parallel.optimizer_rows import refuse_coupled_rows
from toolkit.experts.parallel.ownership import is_owned, owned, ownership_of
from toolkit.experts.parallel.parallel_options import DDPOptions, Dense


def ddp_options(config: DDPOptions) -> DistributedDataParallelKwargs:
    """What an Accelerator takes among its `kwargs_handlers`."""
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
    Raises ValueError for an owned parameter that sits on the root module: DDP builds its ignore names from
    sub-module names, so it would skip the broadcast of such a parameter and still average its gradient.
    """
    refuse_meta(model)
    names = [name for name, p in model.named_parameters() if is_owned(p)]
    for name in names:
        if "." not in name:
            raise ValueError(f"owned parameter {name!r} must live in a sub-module, not on the root")
    if names and accelerator.mixed_precision == "fp16":
        raise UserError(
            "mixed_precision='fp16' cannot be used with experts owned by ranks, because each rank would judge "
            "overflow by its own experts: use bf16, or parallel_strategy='data_parallel'."
        )
    refuse_coupled_rows(optimizer)
    if accelerator.num_processes > 1:
        end_after_gloo_threads()
    if dense == "fsdp2":
        if not names and accelerator.num_processes > 1 and any(ownership_of(p) for p in model.parameters()):
            raise UserError(
                "dense_parallel='fsdp2' leaves experts with their owners, and with ep_size=1 every process has all: "
                "use a larger ep_size, or DDP."
            )
        ignored = owned(model.parameters())
        optimizers = [optimizer, *more_optimizers]
        fully_shard_dense(model, optimizers, accelerator, fsdp_size=fsdp_size, ignored=ignored)
    elif accelerator.num_processes > 1:
        if excluded := names + constant_buffers(model):
            exclude_from_ddp(model, excluded)
        if names and not any(p.requires_grad for p in model.parameters() if not is_owned(p)):
            # DDP refuses a model of which it would average nothing, and nothing else of it is needed.
            return accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if isinstance(model, DistributedDataParallel):
        _keep_group_longer_than(model)
    return model, optimizer


def refuse_meta(model: nn.Module) -> None:
    """Raise UserError for a parameter on the meta device, which has no values to train."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(
                f"parameter {name!r} is on the meta device, without values: load the model's weights before prepare, "
                "as from_pretrained does."
            )


def constant_buffers(model: nn.Module) -> list[str]:
    """The buffers that modules list as `constant_buffers`: equal on all ranks for ever, so DDP need not copy them from
    the first before each forward."""
    found = []
    for prefix, module in model.named_modules():
        if prefix:  # DDP knows no names of the root's own
            found += [f"{prefix}.{name}" for name in getattr(module, "constant_buffers", ())]
    return found


def _keep_group_longer_than(model: DistributedDataParallel) -> None:
    """Hold a reference to the process group of `model` for longer than DDP's reducer and logger do.

    If the reducer drops the last reference, which happens where a model outlives its run, the group is destroyed under
    the GIL and joins its threads, one of which may be waiting for the GIL to free the tensors of its last collective.
    """
    for holder in holders_of_process_group(model):
        weakref.finalize(holder, _release, model.process_group).atexit = False


def _release(_group: dist.ProcessGroup) -> None:
    pass


def end_after_gloo_threads() -> None:
    """Have this process wait a moment, without the GIL, before the interpreter ends. Calling it again changes nothing.

    Gloo's threads free the tensors of the last collective after the caller has gone on, and take the GIL for it. Python
    ends a thread that asks for the GIL too late, which aborts the process ("terminate called without an active
    exception"). Gloo cannot be asked whether its threads are done, and a thread that waits for the GIL needs far less
    than this time.
    """
    atexit.unregister(_give_up_gil)
    atexit.register(_give_up_gil)


def _give_up_gil() -> None:
    time.sleep(0.1)


def refuse_late_parameters(model: nn.Module, prepared: Iterable[Tensor]) -> None:
    """Raise ValueError for a trainable parameter that is not among those `prepared`: no rank would synchronise it and
    no optimizer update it."""
    known = {id(p) for p in prepared}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(
                f"parameter {name!r} was added after the model was prepared, so it would neither be trained nor "
                "synchronised: allocate it before, and change what it holds"
            )
