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

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.data.table import Batch
from toolkit.experts.compat import Operations, multiplies_groups, storage_id, without_values
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
    """Memory of loading besides the weights, before there is an optimizer."""
    host: int = 0
    """Memory of a GPU's host, which is not in `total`."""
    gradients: int = 0
    """Gradients at the end of the backward pass. These and the following two are parts of `step`."""
    gathered: int = 0
    """Parameters that FSDP2 has gathered at a time."""
    activations: tuple[int, ...] = ()
    """Activations that each block keeps for the backward pass."""
    peaks: tuple[int, ...] = ()
    """The most that a step takes until the last block ends, from there until its backward pass, and after that."""

    @property
    def total(self) -> int:
        return self.weights + max(self.optimizer + self.step, self.loading)


def expected_memory(
    model: nn.Module,
    task: Task,
    batch: Batch,
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    blocks: Sequence[nn.Module] = (),
) -> ExpectedMemory:
    """Returns what a step of `model` on `batch` takes, and what stays between steps.

    Args:
        model: On torch's device `meta`, in training mode. It cannot be used afterwards.
        task: Its loss is computed.
        batch: Tensors of the shapes of a micro-batch; values are not looked at.
        build_optimizer: Called with the model.
        blocks: Modules of the model, whose activations are counted one by one.
    """
    begins: list[int] = []
    ends: list[int] = []
    peaks: list[int] = []
    with without_values(), _Allocated() as allocated:
        _give_memory(model)
        optimizer = build_optimizer(model)
        weights = allocated.now

        def end_peak(_: Any = None) -> None:
            peaks.append(allocated.most - weights)
            allocated.most = allocated.now

        def end_forward(_: nn.Module, __: Any, hidden: Any) -> None:
            ends.append(allocated.now)
            end_peak()
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            if hidden.requires_grad:
                hidden.register_hook(end_peak)

        for block in blocks:
            block.register_forward_pre_hook(lambda *_: begins.append(allocated.now))
            block.register_forward_hook(end_forward)
        batch = {name: torch.empty(column.shape, dtype=column.dtype) for name, column in batch.items()}
        task.loss(model, batch).total.backward()
        end_peak()
        before = allocated.now
        optimizer.step()
        state = allocated.now - before
        return ExpectedMemory(
            weights,
            state,
            max(*peaks, allocated.most - weights - state),
            activations=tuple(end - begin for begin, end in zip(begins, ends[: len(blocks)], strict=False)),
            peaks=tuple(int(max(phase, default=0)) for phase in np.split(peaks, [len(blocks), len(blocks) + 1])),
        )


def _give_memory(model: nn.Module) -> None:
    """Replace parameters and buffers on `meta` by ones of the active mode; what was shared is shared again."""
    known: dict[int, Any] = {}
    for module in model.modules():
        own: Any = {"recurse": False, "remove_duplicate": False}
        for name, value in (*module.named_parameters(**own), *module.named_buffers(**own)):
            if id(value) not in known:
                memory = torch.empty(value.shape, dtype=value.dtype)
                is_parameter = isinstance(value, nn.Parameter)
                known[id(value)] = nn.Parameter(memory, value.requires_grad) if is_parameter else memory
            setattr(module, name, known[id(value)])


class _Allocated(Operations):
    """Counts the bytes of all storages that operations return and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._bytes: dict[int, int] = {}

    def run(self, operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # Without values torch multiplies groups of rows in bf16 alone.
        return _product(*args[:3]) if multiplies_groups(operation, args) else operation(*args, **kwargs)

    def note(self, result: Tensor) -> None:
        storage = result.untyped_storage()
        key = storage_id(storage)
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
