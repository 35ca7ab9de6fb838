"""The memory that a process takes to train a model, found before anything is allocated.

    with torch.device("meta"):
        model = build_model()
    expected_memory(model, tk.LanguageModeling(), {"tokens": torch.empty(8, 513, dtype=torch.int64)}, adamw)

One step is made of tensors that have shapes, types and lifetimes, and no values: torch's `FakeTensorMode`. The code is
that of the model and the optimizer, so attention, activation checkpointing, adapters and types count as they are. What
a device's kernels take for themselves is not counted, nor is what its allocator cannot use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.data.table import Batch
from toolkit.train.task import Task


@dataclass(frozen=True)
class ExpectedMemory:
    """Bytes of one process."""

    weights: int
    """Parameters and buffers."""
    optimizer: int
    """The optimizer's state."""
    step: int
    """The most that a step takes besides: activations, gradients and what is between them."""
    loading: int = 0
    """What loading takes besides the weights, before there is an optimizer."""

    @property
    def total(self) -> int:
        return self.weights + max(self.optimizer + self.step, self.loading)


def expected_memory(
    model: nn.Module, task: Task, batch: Batch, build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> ExpectedMemory:
    """Returns what a step of `model` on `batch` takes, and what stays between steps.

    Args:
        model: On torch's device `meta`, in training mode. It cannot be used afterwards.
        task: Its loss is computed.
        batch: Tensors of the shapes of a micro-batch; values are not looked at.
        build_optimizer: Called with the model.
    """
    with FakeTensorMode(), _Allocated() as allocated:
        _give_memory(model)
        optimizer = build_optimizer(model)
        weights = allocated.now
        batch = {name: torch.empty(column.shape, dtype=column.dtype) for name, column in batch.items()}
        task.loss(model, batch).total.backward()
        step = allocated.most - weights
        before = allocated.now
        optimizer.step()
        state = allocated.now - before
        return ExpectedMemory(weights, state, max(step, allocated.most - weights - state))


def _give_memory(model: nn.Module) -> None:
    """Replace parameters and buffers on `meta` by ones of the active mode; what was shared is shared again."""
    known: dict[int, Any] = {}
    for module in model.modules():
        tensors: Sequence[dict[str, Any]] = (module._parameters, module._buffers)
        for each in tensors:
            for name, value in each.items():
                if value is None:
                    continue
                if id(value) not in known:
                    memory = torch.empty(value.shape, dtype=value.dtype)
                    is_parameter = isinstance(value, nn.Parameter)
                    known[id(value)] = nn.Parameter(memory, value.requires_grad) if is_parameter else memory
                each[name] = known[id(value)]


class _Allocated(TorchDispatchMode):
    """Counts the bytes of all storages that operations return and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Without values torch multiplies groups of rows in bf16 alone.
        multiplies = func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor)
        result = _product(*args[:3]) if multiplies else func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes:
            return
        self._bytes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._bytes.pop(key)


def _product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Returns a tensor of the shape of a product by groups: of rows and matrices, or, of two matrices, a sum of each
    group's rows."""
    rows, columns = a.shape[0], b.shape[-1]
    return a.new_empty((len(ends), rows, columns) if b.ndim == 2 else (rows, columns))
