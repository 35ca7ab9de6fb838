"""Private names of torch that the toolkit relies on, each behind one function.

`tests/test_compat.py` tests the behaviour that each function relies on.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data import DataLoader

P = ParamSpec("P")
T = TypeVar("T")


def default_store() -> Any:
    """Return the store of the process group. Its `timeout` is the group's."""
    return dist.distributed_c10d._get_default_store()


def without_dynamo(call: Callable[P, T]) -> Callable[P, T]:
    """Return `call` as `torch.compiler.disable` does, but without an import of dynamo, which takes seconds, until it is
    called."""
    return torch._disable_dynamo(call)


def multiply_each_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors in place by a scalar tensor, in few kernels and without a host sync on a GPU."""
    torch._foreach_mul_(list(tensors), factor)


def norm_of_each(tensors: list[Tensor]) -> Tensor:
    """(len(tensors)): the 2-norm of each, in few kernels on a GPU. All are on one device."""
    return torch.stack(torch._foreach_norm(list(tensors)))


@torch.no_grad()
def copy_without_fsdp(model: nn.Module) -> Any:
    """Copy `model` with whole parameters, without FSDP2's classes and hooks, which have no copies. A collective."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.reshard()
    memo: dict[int, Any] = {
        **{id(p): nn.Parameter(p.full_tensor().clone()) for p in model.parameters() if isinstance(p, DTensor)},
        **{id(module): object.__new__(type(module).__bases__[1]) for module in sharded},
        **{id(state): state for state in (module._get_fsdp_state() for module in sharded)},
    }
    for module in sharded:
        memo[id(module)].__setstate__(copy.deepcopy(module.__getstate__(), memo))
    copied = copy.deepcopy(model, memo)
    for one, other in zip(model.modules(), copied.modules(), strict=True):
        for name, hooks in vars(one).items():
            for key, hook in hooks.items() if name.endswith("_hooks") and isinstance(hooks, dict) else ():
                if hook.__module__.startswith("torch.distributed.fsdp"):
                    del getattr(other, name)[key]
    return copied


def new_iterator(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator with new workers; persistent workers would continue with the previous random state."""
    loader._iterator = None
    return iter(loader)


def embedding_bag_weights_grad(
    grad_TD: Tensor, table_ND: Tensor, indices_N: Tensor, first_T: Tensor, bag_N: Tensor
) -> Tensor:
    """(N): the gradient of `embedding_bag(mode="sum")` by its weights, which autograd gives only with the table's.

    `first_T` is the index at which each bag begins, `bag_N` the bag of each index.
    """
    mode_sum = 0
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad_TD, table_ND, indices_N, first_T, bag_N, mode_sum
    )


def set_data_of_other_shape(parameter: Tensor, data: Tensor) -> None:
    """Set `parameter.data = data` for `data` of a different shape.

    A graph kept from an earlier step may hold the node that accumulates the parameter's gradients, which requires the
    original shape. Torch creates a new node if the dtype changes, but not if the shape changes.
    """
    other = torch.float16 if data.dtype == torch.float32 else torch.float32
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def version_of(tensor: Tensor) -> int:
    """The number of changes of `tensor` in place."""
    return tensor._version


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread; a forward that runs meanwhile is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_reentrant_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint.checkpoint(use_reentrant=True)` is running its first forward on this thread.

    It disables gradients; the recomputation in the backward pass makes the graph. False in evaluation, because no input
    needs a gradient.
    """
    code = CheckpointFunction.forward.__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and any(frame.f_locals["ctx"].needs_input_grad)


def exclude_from_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Have DDP, which will wrap `model`, neither broadcast nor average these parameters and buffers, nor those that it
    was told of before; each is in a sub-module."""
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*before, *names])


def call_before_each_ddp(prepare: Callable[[nn.Module], object]) -> None:
    """Have each DDP that is made from now on call `prepare(module)` with the module that it wraps, once."""
    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def prepare_and_make(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        prepare(module)
        make(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = prepare_and_make  # type: ignore[method-assign]


def call_before_clipping(by_norm: Callable[[list[Tensor]], None], by_value: Callable[[list[Tensor]], None]) -> None:
    """Have torch's functions that clip gradients call `by_norm(parameters)` or `by_value(parameters)` first.

    Also if `clip_grad_norm_` was imported before, because it calls the function that is replaced here. A
    `clip_grad_value_` that was imported before is unchanged.
    """

    def first(prepare: Callable[[list[Tensor]], None], clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def prepare_and_clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            prepare(listed)
            return clip(listed, *args, **kwargs)

        return prepare_and_clip

    clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = first(by_norm, clip_grad._clip_grads_with_norm_)
    clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_ = first(by_value, clip_grad.clip_grad_value_)


def call_before_averaging(check: Callable[[Iterable[Tensor], Iterable[Tensor]], None]) -> None:
    """Have each `AveragedModel` call `check(averages, parameters)` before it averages parameters of a model."""
    average = AveragedModel.update_parameters

    @functools.wraps(average)
    def check_and_average(self: AveragedModel, model: nn.Module) -> None:
        check(self.module.parameters(), model.parameters())
        average(self, model)

    AveragedModel.update_parameters = check_and_average  # type: ignore[method-assign]


def holders_of_process_group(model: DistributedDataParallel) -> tuple[Any, ...]:
    """The C++ objects of DDP that keep its process group alive."""
    return model.reducer, model.logger


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """How long a collective of `group`, None for the world's, waits before it fails."""
    group = group or dist.group.WORLD
    assert group is not None
    return group._get_backend(group._device_types[0]).options._timeout


def without_compile_prefix(name: str) -> str:
    """The name that a parameter or module has without `torch.compile`."""
    return name.replace("_orig_mod.", "")


class MovesParameters(nn.Module):
    """A module that changes some of its own parameters itself when it is moved or cast."""

    def moved(self, change: Callable[[Tensor], Tensor]) -> Collection[str]:
        """Move by `change`, and return the names of the parameters that `to`, `cuda` and casts leave alone."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        names, own = self.moved(fn), self._parameters
        self._parameters = {name: parameter for name, parameter in own.items() if name not in names}
        try:
            return super()._apply(fn, recurse)
        finally:
            self._parameters = own | self._parameters


def with_tables(module: nn.Module, own_type: type[Any], tables: Mapping[str, Tensor]) -> Any:
    """Return a copy of `module` of class `own_type`, with `tables` as its own frozen parameters, without hooks.

    Buffers and children are copied, other attributes shared.
    """
    other: Any = object.__new__(own_type)
    nn.Module.__init__(other)
    vars(other).update((k, v) for k, v in vars(module).items() if k not in vars(other) or k == "training")
    other._parameters = {name: nn.Parameter(table, requires_grad=False) for name, table in tables.items()}
    other._buffers, other._modules = copy.deepcopy((module._buffers, module._modules))
    return other


def without_values() -> AbstractContextManager[Any]:
    """Return a context in which operations make tensors of shapes, types and lifetimes, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


class Operations(TorchDispatchMode):
    """A context in which torch calls `run` for each operation, and `note` with each tensor that comes of it."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from torch.utils._pytree import tree_leaves

        result = self.run(func, args, kwargs or {})
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.note(value)
        return result

    def run(self, operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the operation's result."""
        return operation(*args, **kwargs)

    def note(self, result: Tensor) -> None:
        """Called with each tensor of a result."""


def multiplies_groups(operation: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether `operation` is torch's `grouped_mm`, of tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return operation is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor)


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one is alive, also one without values."""
    return storage._cdata
