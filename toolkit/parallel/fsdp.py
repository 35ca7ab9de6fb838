"""FSDP2 for the parameters that would otherwise be replicated; experts are not sharded and stay with their owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from toolkit.compat import mark_as_prepared
from toolkit.errors import UserError


def fully_shard_dense(
    model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, *, ignored: Iterable[Tensor]
) -> None:
    """Shard all parameters of `model` but `ignored` over the ranks, in place. A collective.

    Modules that repeat in a list are gathered one at a time, the rest together. `optimizer` is given the new
    parameters; it must not have stepped. Accelerate is told that the model is prepared, because it would wrap it in
    DDP; so autocast is entered here. Does nothing on one process.

    Raises UserError for fp16, whose loss scaler looks for overflow on each rank separately, and for an optimizer that
    has state already.
    """
    if accelerator.num_processes == 1:
        return
    if accelerator.mixed_precision == "fp16":
        raise UserError("mixed precision fp16 cannot be used with fully sharded parameters: use bf16.")
    if optimizer.state:
        raise UserError(
            f"optimizer {type(optimizer).__name__} has state before the first step, which fully sharded parameters "
            "would not take over: use one such as AdamW that makes it later, or dense parameters under DDP."
        )
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    # Parameters are gathered in their own type, because autocast casts, as under DDP; and those of the root are
    # resharded, too, so that between two steps the model has the parameters that the optimizer has.
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(),
        "ignored_params": set(ignored),
        "reshard_after_forward": True,
    }
    for block in _repeated(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    after = dict(model.named_parameters())
    name_of = {was: name for name, was in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [after[name_of[id(parameter)]] for parameter in group["params"]]
    if accelerator.mixed_precision == "bf16":
        model.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(model.forward)
    mark_as_prepared(model)


def _repeated(model: nn.Module) -> Iterable[nn.Module]:
    """The outermost modules in lists: the blocks of a transformer."""
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            yield from module
        else:
            yield from _repeated(module)
