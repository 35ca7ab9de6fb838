"""CPU offload of frozen experts, with prefetch: they stay in main memory or a file, and are copied to the GPU by layer.

A layer's matrices are copied when it is computed, in the forward and the backward pass, while the following layer's are
prefetched: the GPU holds two layers. All experts are copied, because a training batch leaves hardly one without rows:
with 8 of 128 experts per token, 64 tokens leave out 1.6 %.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.experts.compat import MovesParameters, version_of
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.sharding.layout import Layout

ALIGNED = 256
"""Bytes of which the place of a matrix in a layer's memory is a multiple."""


def page_locked(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor in page-locked main memory.

    Memory is locked in place, because torch's pinned allocator rounds sizes up to powers of two.
    """
    rows = torch.empty(shape, dtype=dtype)
    if torch.cuda.is_available() and rows.nbytes:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)))
        weakref.finalize(rows.untyped_storage(), runtime.cudaHostUnregister, rows.data_ptr()).atexit = False
    return rows


@dataclass
class _Held:
    """Memory of the device, and the layer whose matrices were copied there last."""

    memory: Tensor
    """uint8."""
    layer: int | None = None
    matrices: dict[str, Tensor] = field(default_factory=dict)
    version: tuple[Any, ...] = ()
    copied: Any = None
    """The event after the copy, on a GPU."""


class LayersOnHost:
    """Experts modules that keep matrices in the host's memory, in the order in which they are computed."""

    def __init__(self) -> None:
        self._modules: list[RowsOnHost] = []
        self._held: tuple[_Held, _Held] | None = None
        """Matrices of the current layer, and of the expected next one."""
        self._step = 1
        """1 in forward passes, -1 in backward."""
        self._stream: Any = None
        """Copy stream (GPU)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LayersOnHost:
        other = memo[id(self)] = LayersOnHost()
        other._modules = copy.deepcopy(self._modules, memo)
        return other

    def number_of(self, module: RowsOnHost) -> int:
        """Return the number of a layer, which is added if it is new."""
        if module not in self._modules:
            self._modules.append(module)
        return self._modules.index(module)

    def matrices(self, layer: int, device: torch.device) -> Mapping[str, Tensor]:
        """Return a layer's matrices on `device`, valid until a call for another layer."""
        if self._held is None or self._held[0].memory.device != device:
            self._held = self._take(device)
        here, ahead = self._held
        if here.layer != layer:
            self._step = 1 if here.layer is None or layer > here.layer else -1
            here, ahead = self._held = ahead, here
        self._fill(here, layer)
        following = layer + self._step
        if not 0 <= following < len(self._modules):  # a backward follows the last layer, and the next step the first
            following = layer - self._step
        if 0 <= following < len(self._modules):
            self._fill(ahead, following)
        if here.copied is not None:
            torch.cuda.current_stream(device).wait_event(here.copied)
        return here.matrices

    def _take(self, device: torch.device) -> tuple[_Held, _Held]:
        size = max(sum(map(_room, _kept(module).values())) for module in self._modules)
        one, other = (_Held(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(2))
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            for each in (one, other):
                each.memory.record_stream(self._stream)
        return one, other

    def _fill(self, held: _Held, layer: int) -> None:
        """Update `held` to the current matrices of a layer."""
        module = self._modules[layer]
        # Rows that are moved may be received without a new version of their parameter, and are placed then.
        version = (module.expert_stack.placement, *map(version_of, _kept(module).values()))
        if (held.layer, held.version) != (layer, version):
            held.layer, held.version = layer, version
            self._copy(held, layer)

    def _copy(self, held: _Held, layer: int) -> None:
        """Copy the matrices of a layer, after all work queued on the device."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(held.memory.device))
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            begin = 0
            for name, rows in _kept(self._modules[layer]).items():
                place = held.memory[begin : begin + rows.nbytes].view(rows.dtype).view(rows.shape)
                held.matrices[name] = place.copy_(rows.detach(), non_blocking=True)
                begin += _room(rows)
            if self._stream is not None:
                held.copied = self._stream.record_event()


def _room(rows: Tensor) -> int:
    return -(-rows.nbytes // ALIGNED) * ALIGNED


def _kept(module: RowsOnHost) -> dict[str, nn.Parameter]:
    return {name: module.get_parameter(name) for name in sorted(module.computed_on)}


class RowsOnHost(MovesParameters, Layout):
    """Experts with frozen matrices that may stay in the host's memory when the module is moved."""

    expert_stack: ExpertStack
    layers_on_host: LayersOnHost
    number_on_host: int

    def keep_on_host(self, name: str, layers: LayersOnHost) -> None:
        """Offload the parameter `name`, computed on its present device, as one of the matrices of `layers`."""
        self.layers_on_host, self.number_on_host = layers, layers.number_of(self)
        self.computed_on = {**self.computed_on, name: self.get_parameter(name).device}

    def moved(self, change: Callable[[Tensor], Tensor]) -> Collection[str]:
        """Note the new device of the computation."""
        if self.computed_on:
            devices = {name: change(parameter.new_empty(0)).device for name, parameter in _kept(self).items()}
            self.computed_on = self.expert_stack.computed_on = devices
        return self.computed_on.keys()


def is_on_host(module: nn.Module, name: str) -> bool:
    """Return whether the parameter `name` of an experts module stays in the host's memory."""
    return isinstance(module, RowsOnHost) and name in module.computed_on


def rows_on(module: RowsOnHost, name: str, device: torch.device) -> Tensor:
    """Return the rows of the parameter `name` on the compute `device`; valid until another layer is computed."""
    parameter = module.get_parameter(name)
    if parameter.device == device:
        return parameter.detach()
    return module.layers_on_host.matrices(module.number_on_host, device)[name]
