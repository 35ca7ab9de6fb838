"""The parameters that are not the experts': what DDP must leave alone, and what must hold of them. No Accelerate."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import cache, partial

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.experts.compat import call_before_each_ddp, exclude_from_ddp, holders_of_process_group
from toolkit.experts.parallel.ownership import is_owned


def leave_out_of_ddp(model: nn.Module, equal: Sequence[str] = ()) -> None:
    """Put owned parameters, and what is equal on all ranks for ever, on the list of what DDP leaves alone.

    DDP then neither overwrites them with the first rank's nor averages their gradients. Without DDP it changes nothing.

    Args:
        model: Which DDP will wrap.
        equal: The names of frozen parameters that all ranks read from the same files.

    Raises:
        ValueError: For an owned parameter on the root module: DDP makes the names that it ignores from those of
            sub-modules, so it would skip the broadcast of such a parameter and still average its gradient.
    """
    names = [name for name, parameter in model.named_parameters() if is_owned(parameter)]
    for name in names:
        if "." not in name:
            raise ValueError(f"owned parameter {name!r} must live in a sub-module, not on the root")
    if excluded := [*names, *equal, *constant_buffers(model)]:
        exclude_from_ddp(model, excluded)


@cache
def leave_out_of_every_ddp() -> None:
    """Have each DDP that is made from now on leave out owned parameters, also those of a module within another one.

    A LightningModule, a module that computes the loss, or `torch.compile` put other names before those of the model, by
    which DDP excludes parameters.
    """

    def exclude(module: nn.Module) -> None:
        if any(is_owned(parameter) for parameter in module.parameters()):
            leave_out_of_ddp(module)

    call_before_each_ddp(exclude)


OF_EACH_PROCESS = "batch norm is over each process's part of the batch, unlike in one process: "
"""The beginning of what is said of a model that `has_batch_norm`; how it is made one over all depends on the host."""


def has_batch_norm(model: nn.Module) -> bool:
    """Whether `model` has batch norm that is not torch's `SyncBatchNorm`."""
    return any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for module in model.modules())


def constant_buffers(model: nn.Module) -> list[str]:
    """The buffers that modules list as `constant_buffers`: equal on all ranks for ever, so DDP need not copy them from
    the first before each forward."""
    found = []
    for prefix, module in model.named_modules():
        if prefix:  # DDP knows no names of the root's own
            found += [f"{prefix}.{name}" for name in getattr(module, "constant_buffers", ())]
    return found


def keep_group_longer_than(model: DistributedDataParallel) -> None:
    """Hold a reference to the process group of `model` for longer than DDP's reducer and logger do.

    If the reducer drops the last reference, which happens where a model outlives its run, the group is destroyed under
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
