"""Parameters and buffers that DDP leaves out, parameters that it would miss, and the end of its process group."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterable
from functools import cache, partial

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.experts.compat import call_before_each_ddp, exclude_from_ddp, holders_of_process_group
from toolkit.experts.parallel.ownership import is_owned


def leave_out_of_ddp(model: nn.Module) -> list[str]:
    """Exclude owned parameters and constant buffers from DDP.

    DDP then neither broadcasts them from the first rank nor averages their gradients. Without DDP it has no effect.
    Modules list buffers, and frozen parameters, as `constant_buffers` that are equal on all ranks for ever, so that DDP
    need not copy them before each forward pass.

    Args:
        model: The model that DDP will wrap.

    Returns:
        The names of owned parameters.

    Raises:
        ValueError: An owned parameter is on the root module. DDP excludes parameters by the names of sub-modules, so it
            would skip the broadcast of this parameter but still average its gradient.
    """
    owned = [name for name, parameter in model.named_parameters() if is_owned(parameter)]
    for name in owned:
        if "." not in name:
            raise ValueError(f"owned parameter {name!r} must live in a sub-module, not on the root")
    constant = [
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        for name in getattr(module, "constant_buffers", ())
        if prefix  # DDP knows no names of the root's own
    ]
    if owned or constant:
        exclude_from_ddp(model, [*owned, *constant])
    return owned


@cache
def leave_out_of_every_ddp() -> None:
    """Call `leave_out_of_ddp` with the module of every DDP instance that is created from now on.

    DDP excludes parameters by name, and a LightningModule, a loss module or `torch.compile` adds a prefix to names.
    """
    call_before_each_ddp(leave_out_of_ddp)


BATCH_NORM_IS_LOCAL = "batch norm is over each process's part of the batch, unlike in one process: "
"""First part of the warning about a model that `has_batch_norm`; the integration adds the remedy."""


def has_batch_norm(model: nn.Module) -> bool:
    """Whether `model` has batch norm that is not torch's `SyncBatchNorm`."""
    return any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for module in model.modules())


def keep_group_longer_than(model: DistributedDataParallel) -> None:
    """Hold a reference to the process group of `model` for longer than DDP's reducer and logger do.

    If the reducer drops the last reference, which happens if a model outlives its run, the group is destroyed under
    the GIL and joins its threads, one of which may be waiting for the GIL to free the tensors of its last collective.
    """
    for holder in holders_of_process_group(model):
        weakref.finalize(holder, lambda _: None, model.process_group).atexit = False


def end_after_gloo_threads() -> None:
    """Have this process wait a moment, without the GIL, before the interpreter ends. Calling it again changes nothing.

    Gloo's threads free the tensors of the last collective after the caller has gone on, and take the GIL for it. Python
    ends a thread that asks for the GIL too late, which aborts the process ("terminate called without an active
    exception"). Gloo cannot be asked whether its threads are done, and a thread that waits for the GIL needs far less
    than this time.
    """
    atexit.unregister(_GIVE_UP_GIL)
    atexit.register(_GIVE_UP_GIL)


_GIVE_UP_GIL = partial(time.sleep, 0.1)


def refuse_late_parameters(model: nn.Module, prepared: Iterable[Tensor]) -> None:
    """Raise ValueError for a trainable parameter that is not among those `prepared`: no rank would synchronise it and
    no optimizer update it."""
    known = {id(p) for p in prepared}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(
                f"parameter {name!r} was added after the model was prepared, so it would neither be trained nor "
                "synchronised: allocate it before, and change its values"
            )
