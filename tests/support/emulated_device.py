"""A device emulated on the CPU with constraints of a GPU, for tests without a GPU.

    def on_the_device() -> None:              # in a separate process: `emulate` cannot be undone
        device = emulate()
        with device:
            model.to(device.device)
            ...
        assert device.waits == []

The CPU computes, so results equal CPU results. Constraints of a GPU:

- Operations on tensors of two devices raise, except for CPU scalars and CPU indices.
- Host syncs are recorded with the file that causes them: reading a value, blocking copies from or to other devices,
  and operations with a result size that depends on values.

There are no kernels, streams, device memory or device random numbers, and autocast casts only as the toolkit does.
torch's interfaces for backends in Python are experimental.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.host_waits import HostWait, innermost_place, restart_process_group

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten._unique2.default,
}
"""Operations that always sync; `_waits` lists more for some arguments."""
COPIES = {aten._to_copy.default, aten.copy_.default}
BY_INDICES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class EmulatedTensor(Tensor):
    """Tensor of the emulated device with data on the CPU."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> EmulatedTensor:
        wrapper: Any = Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=torch.device("emulated", 0),
        )
        wrapper.on_cpu = on_cpu
        return wrapper

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: EmulatedTensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.on_cpu = value.on_cpu

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("tensors of the emulated device have no array: use .cpu() first")

    def __repr__(self, **_: Any) -> str:
        return f"EmulatedTensor({self.on_cpu!r})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operation} outside of `with emulate():`")


class EmulatedDevice(TorchDispatchMode):
    """The device while it is entered; `waits` lists host syncs."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("emulated", 0)
        self.waits: list[HostWait] = []
        self.libraries: list[torch.library.Library] = []  # registrations end with the object

    def note(self, operation: Any) -> None:
        place = innermost_place()
        if not place and operation is aten.copy_.default:
            return  # DDP copies gloo's results, which are CPU tensors
        self.waits.append(HostWait(str(operation), place))

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        emulated = [tensor for tensor in tensors if isinstance(tensor, EmulatedTensor)]
        target = kwargs.get("device")
        to_device = bool(emulated) if target is None else torch.device(target).type == "emulated"
        if not emulated and not to_device:
            return operation(*args, **kwargs)
        _check_devices(operation, tensors, args)
        if _waits(operation, args, kwargs, emulated):
            self.note(operation)
        if to_device and target is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        held = {id(tensor.on_cpu): tensor for tensor in emulated}
        result = operation(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor) or (id(value) not in held and not to_device):
                return value
            return held[id(value)] if id(value) in held else EmulatedTensor(value)

        return tree_map(placed, result)


def _on_cpu(value: Any) -> Any:
    return value.on_cpu if isinstance(value, EmulatedTensor) else value


def _check_devices(operation: Any, tensors: Sequence[Tensor], args: Sequence[Any]) -> None:
    others = [tensor for tensor in tensors if not isinstance(tensor, EmulatedTensor)]
    if len(others) == len(tensors) or operation in COPIES:
        return
    if operation in BY_INDICES and isinstance(args[0], EmulatedTensor):
        others = [tensor for tensor in others if not any(tensor is index for index in args[1])]
    writes_other = operation._schema.name.endswith("_") and any(args[0] is tensor for tensor in others)
    if writes_other or any(tensor.ndim for tensor in others):
        shapes = [tuple(tensor.shape) for tensor in others]
        raise RuntimeError(f"{operation}: expected all tensors on one device, found {shapes} on the CPU")


def _waits(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], emulated: Sequence[Tensor]) -> bool:
    if operation in WAITS:
        return True
    if operation is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if operation in BY_INDICES:  # masks are counted, CPU indices are copied
        given = [index for index in args[1] if index is not None]
        return any(index.dtype == torch.bool or not isinstance(index, EmulatedTensor) for index in given)
    if operation is aten._to_copy.default:
        between = not emulated or torch.device(kwargs.get("device") or "emulated").type != "emulated"
        return between and not kwargs.get("non_blocking")
    if operation is aten.copy_.default:
        between = len(emulated) == 1
        return between and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    return False


BACKEND = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    is_bf16_supported=lambda: True,
    get_rng_state=lambda *_, **__: torch.zeros(1, dtype=torch.uint8),
    set_rng_state=lambda *_, **__: None,
    manual_seed=lambda _: None,
    manual_seed_all=lambda _: None,
    _is_in_bad_fork=lambda: False,
)
"""Device module `torch.emulated`."""


class _Event:
    """Event at the current time of the host: the device is synchronous."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.time - self.time)


def emulate() -> EmulatedDevice:
    """Make Accelerate use the emulated device. Call it once in a separate process, before any backward pass."""
    from accelerate.state import AcceleratorState, PartialState
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("emulated", BACKEND)
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` creates CPU tensors and copies
    device = EmulatedDevice()
    without_casts = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    without_casts.fallback(torch.library.fallthrough_kernel)
    device.libraries.append(without_casts)
    torch_: Any = torch
    torch_.Event = _Event
    torch_.accelerator.synchronize = lambda *_: device.note("synchronize")
    torch.__future__.set_swap_module_params_on_conversion(True)  # modules keep their parameters, as on a GPU
    torch_.utils.swap_tensors = _keeping_attributes(torch.utils.swap_tensors)
    states: list[Any] = [PartialState, AcceleratorState]
    for state in states:
        state.device = property(lambda _: device.device, lambda *_: None)
        state._check_initialized = lambda *_, **__: None  # raises for devices other than the CPU
    if dist.is_initialized():
        restart_process_group("cpu:gloo,emulated:gloo")
    return device


def _keeping_attributes(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """Make `swap` keep attributes and hooks of the first tensor, as an assignment to `data` does."""

    def swap_tensors(first: Any, second: Any) -> None:
        kept = {name: value for name, value in vars(first).items() if name != "on_cpu"}
        hooks = first._backward_hooks, first._post_accumulate_grad_hooks
        swap(first, second)
        vars(first).update(kept)
        first._backward_hooks, first._post_accumulate_grad_hooks = hooks

    return swap_tensors
