"""The tensors of a checkpoint: under which keys, in which files, and how they get out of and into a model.

    model.safetensors           copied parameters and buffers, by name; from the main process
    optimizer.safetensors       their optimizer states, "<parameter>.<state>"
    experts-00000.safetensors   rows with stable ids, from each rank that owns some: "<parameter>/<id>" and
    experts-00001.safetensors   "<parameter>/<id>/<state>"; each keeps its row dimension of 1

A rank reads its rows by id from whichever file has them, so what one number of processes or one placement saved,
another can load.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from toolkit.parallel import EMPTY_ROW, Sharding, sharding_of

if TYPE_CHECKING:
    from toolkit.run import Run

MODEL, OPTIMIZER, ROWS = "model.safetensors", "optimizer.safetensors", "experts-{rank:05d}.safetensors"

FileContents = dict[str, dict[str, Tensor]]
"""File name -> key -> tensor on the CPU."""


# --- out of a model ----------------------------------------------------------------------------------------------


def files_to_write(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> FileContents:
    """What this rank writes."""
    copied: dict[str, Tensor] = dict(_buffers(model)) if run.is_main else {}
    moments: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    states = unwrapped(optimizer).state
    for name, parameter in model.named_parameters():
        state = {key: value for key, value in states.get(parameter, {}).items() if value is not None}
        sharding = sharding_of(parameter)
        if sharding is None and run.is_main:
            copied[name] = parameter
            moments |= {f"{name}.{key}": value for key, value in state.items()}
        elif sharding is not None and _writes(sharding, run):
            for row, row_id in _held(sharding):
                rows[f"{name}/{row_id}"] = parameter[row : row + 1]
                for key, value in state.items():
                    # What the rows of a stack share, such as Adam's step, goes with each, as rows may be dealt anew.
                    each = value[row : row + 1] if value.ndim else value.clone()
                    rows[f"{name}/{row_id}/{key}"] = each
    files = {MODEL: copied, OPTIMIZER: moments, ROWS.format(rank=run.rank): rows}
    return {
        file: {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
        for file, tensors in files.items()
        if tensors or (run.is_main and file == MODEL)
    }


def list_rows(files: FileContents) -> dict[str, dict[str, list[int]]]:
    """File name -> parameter -> the ids of its rows that the file holds."""
    rows: dict[str, dict[str, list[int]]] = {}
    for file in files.keys() - {MODEL, OPTIMIZER}:
        for weight in filter(re.compile(r".+/\d+").fullmatch, files[file]):
            parameter, _, row_id = weight.rpartition("/")
            rows.setdefault(file, {}).setdefault(parameter, []).append(int(row_id))
    return rows


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict would hold."""
    persistent = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _held(sharding: Sharding) -> Iterator[tuple[int, int]]:
    """(row, stable id) of the rows that hold something."""
    return ((row, row_id) for row, row_id in enumerate(sharding.row_ids) if row_id != EMPTY_ROW)


def _writes(sharding: Sharding, run: Run) -> bool:
    """Whether this rank is the one, of those that hold the same rows, that saves them."""
    if sharding.groups.ep_size == 1:
        return run.is_main
    replicas = sharding.groups.replica_group
    return replicas is None or dist.get_rank(replicas) == 0


# --- into a model ------------------------------------------------------------------------------------------------


class SavedTensors:
    """The tensors of a checkpoint, read when asked for: weights by key, and each weight's optimizer states."""

    def __init__(self) -> None:
        self.weights: dict[str, tuple[Any, str]] = {}
        self.states: dict[str, dict[str, tuple[Any, str]]] = {}
        self._files = ExitStack()

    def open(self, path: Path, names: Iterable[str]) -> None:
        """Open those of the files `names` in `path` that hold tensors, and list their keys."""
        for name in names:
            if not name.endswith(".safetensors"):
                continue
            file = self._files.enter_context(safe_open(path / name, "pt"))
            for key in file.keys():  # noqa: SIM118 (not a dict)
                weight, state = _split(name, key)
                if state is None:
                    self.weights[weight] = file, key
                else:
                    self.states.setdefault(weight, {})[state] = file, key

    def known(self) -> set[str]:
        """Every weight that something is said about."""
        return {*self.weights, *self.states}

    def describe(self, weight: str) -> str:
        """Type and shape, without reading the tensor."""
        file, key = self.weights[weight]
        piece = file.get_slice(key)
        shape = tuple(piece.get_shape())
        return describe_tensor(shape, (piece[:0] if shape else file.get_tensor(key)).dtype)

    def weight(self, weight: str) -> Tensor:
        file, key = self.weights[weight]
        return file.get_tensor(key)

    def state(self, weight: str) -> dict[str, Tensor]:
        return {name: file.get_tensor(key).clone() for name, (file, key) in self.states.get(weight, {}).items()}

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()


def _split(file: str, key: str) -> tuple[str, str | None]:
    """The weight that the tensor `key` of `file` belongs to, and which of its optimizer states it is, if any."""
    if file == MODEL:
        return key, None
    if file == OPTIMIZER:
        weight, _, state = key.rpartition(".")
        return weight, state
    match = re.fullmatch(r"(.+/\d+)(?:/([^/]+))?", key)
    return (match[1], match[2]) if match else (key, None)


def targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Where this rank wants the weight of each key to be put."""
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        if sharding is None:
            yield name, parameter
        else:
            for row, row_id in _held(sharding):
                yield f"{name}/{row_id}", parameter.detach()[row : row + 1]
    yield from _buffers(model)


def load_model(model: nn.Module, tensors: SavedTensors) -> None:
    """Copy this rank's weights into `model`, in place."""
    with torch.no_grad():
        for weight, target in targets(model):
            target.copy_(tensors.weight(weight))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: SavedTensors) -> None:
    """Give `optimizer` the saved states of its parameters; the settings of its groups stay its own."""
    optimizer = unwrapped(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    packed = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = (_load_state(names[parameter], parameter, tensors) for parameter in parameters)
    packed["state"] = {index: state for index, state in enumerate(states) if state}
    optimizer.load_state_dict(packed)


def _load_state(name: str, parameter: nn.Parameter, tensors: SavedTensors) -> dict[str, Tensor]:
    """The optimizer's state of one parameter: as saved, or put together from its rows."""
    sharding = sharding_of(parameter)
    if sharding is None:
        return tensors.state(name)
    state: dict[str, Tensor] = {}
    for row, row_id in _held(sharding):
        for key, value in tensors.state(f"{name}/{row_id}").items():
            if value.ndim == 0:
                # Rows that come from several stacks may differ in age: the oldest has the least bias to correct.
                state[key] = torch.maximum(state.get(key, value), value)
            else:
                whole = state.setdefault(key, value.new_zeros(parameter.shape[0], *value.shape[1:]))
                whole[row] = value[0]
    return state


def describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Such as float32[4, 16]."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer within Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
