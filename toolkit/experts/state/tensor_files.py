"""The tensors of a checkpoint: keys, files, and how they are read from and written to a model.

    model.safetensors           replicated parameters and buffers, by name; from the main process
    optimizer.safetensors       their optimizer states, "<parameter>.<state>"
    experts-00000.safetensors   rows with uids, from   each rank that owns some: "<parameter>/<id>" and
    experts-00001.safetensors   "<parameter>/<id>/<state>"; each keeps its row dimension of 1

Of a row with replicas the owner's is saved. A rank reads its rows by id from whichever file holds them, so a checkpoint
loads under any number of processes and any placement. Parameters that FSDP2 shards as a `DTensor` are saved like
replicated ones: gathered one at a time, and sharded again when they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects, is_main, rank
from toolkit.experts.parallel.optimizer_rows import rows_of_state, unwrapped
from toolkit.experts.parallel.ownership import Ownership, local_rows, ownership_of, spread_like
from toolkit.experts.placement.placement import EMPTY_ROW

MODEL, OPTIMIZER, ROWS = "model.safetensors", "optimizer.safetensors", "experts-{rank:05d}.safetensors"

NUMBER = " (number)"
"""After the key of an optimizer state that is a Python number, as a step may be."""

FileContents = dict[str, dict[str, Tensor]]
"""File name -> key -> tensor on the CPU."""

ToCPU = Callable[[str, Tensor], Tensor]
"""Of a key and its tensor, which is detached: what is written."""


def on_cpu(key: str, tensor: Tensor) -> Tensor:  # noqa: ARG001
    """The tensor itself, where it is on the CPU."""
    return tensor.cpu().contiguous()


# --- out of a model ----------------------------------------------------------------------------------------------


def files_to_write(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], to_cpu: ToCPU = on_cpu
) -> FileContents:
    """Returns what this rank writes. A collective, because sharded tensors are gathered."""
    rows_file = ROWS.format(rank=rank())
    files: FileContents = {MODEL: dict(_buffers(model)) if is_main() else {}, OPTIMIZER: {}, rows_file: {}}
    states = {parameter: state for each in optimizers for parameter, state in unwrapped(each).state.items()}
    for name, parameter in model.named_parameters():
        state = tensors_of(name, states.get(parameter, {}))
        ownership = ownership_of(parameter)
        if ownership is None:
            moments = [(OPTIMIZER, f"{name}.{key}", value) for key, value in state.items()]
            for file, key, value in [(MODEL, name, parameter), *moments]:
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if is_main():  # a gathered tensor at once, so that no device holds two
                    files[file][key] = value if whole is value else whole.cpu()
        elif _writes(ownership):
            for row, row_id in _owned(ownership):
                files[rows_file][f"{name}/{row_id}"] = parameter[row : row + 1]
                for key, value in state.items():
                    # What all rows share, such as Adam's step, is saved with each, as each may be loaded elsewhere.
                    rows = rows_of_state(name, key, value, parameter) if value.ndim else value
                    each = rows[row : row + 1] if value.ndim else value.clone()
                    files[rows_file][f"{name}/{row_id}/{key}"] = each
    return {
        file: {key: to_cpu(f"{file}/{key}", tensor.detach()) for key, tensor in tensors.items()}
        for file, tensors in files.items()
        if tensors or (is_main() and file == MODEL)
    }


def tensors_of(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The optimizer state of the parameter `name` as tensors: a Python number of one element, under a marked key."""
    tensors = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        elif isinstance(value, int | float):
            tensors[key + NUMBER] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        elif value is not None:
            raise UserError(
                f"optimizer state {key!r} of {name!r} is a {type(value).__name__}, which a checkpoint cannot hold: "
                "use an optimizer whose state is tensors and numbers."
            )
    return tensors


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `optimizer` keeps of the parameters of `model` on this rank, each with words that name it."""
    states = unwrapped(optimizer).state
    for name, parameter in model.named_parameters():
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer state {key!r} of {name!r}", value


def first_not_finite(
    tensors: Iterable[tuple[str, Tensor]], is_right: Callable[[Tensor], Tensor] = torch.isfinite
) -> str | None:
    """The name of the first tensor of which not every element `is_right`. The host waits once, not for each tensor."""
    all_local = ((name, local_rows(tensor)) for name, tensor in tensors)
    floating = [(name, local.detach()) for name, local in all_local if local.is_floating_point()]
    if not floating:
        return None
    # Where the sum is finite, so are all elements; it takes a tenth of the time of a look at each.
    sums = [local.sum(dtype=torch.promote_types(local.dtype, torch.float32)) for _, local in floating]
    device = next((total.device for total in sums if total.device.type != "cpu"), sums[0].device)
    finite = torch.stack([total.isfinite().to(device) for total in sums]).tolist()
    suspects = (each for each, is_finite in zip(floating, finite, strict=True) if not is_finite)
    return next((name for name, local in suspects if not is_right(local).all()), None)


def describe_places(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Parameter -> its rows' ids, in the order of slots, on each rank of an EP group. A collective."""
    shardings = {name: s for name, parameter in model.named_parameters() if (s := ownership_of(parameter)) is not None}
    everyones = gather_objects({name: list(ownership.row_ids) for name, ownership in shardings.items()})
    # All EP groups hold the same.
    firsts = {name: ownership.groups.ep_groups[0] for name, ownership in shardings.items()}
    return {name: {"slots": [everyones[rank][name] for rank in ranks]} for name, ranks in firsts.items()}


def describe_tied(model: nn.Module) -> dict[str, str]:
    """Further name of a parameter, as of a head that is tied to an embedding -> the name that files have it under."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[parameter] for name, parameter in every if name != names[parameter]}


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


def _held(ownership: Ownership) -> Iterator[tuple[int, int]]:
    """(row, uid) of the rows that hold something."""
    return ((row, row_id) for row, row_id in enumerate(ownership.row_ids) if row_id != EMPTY_ROW)


def _owned(ownership: Ownership) -> Iterator[tuple[int, int]]:
    """(row, uid) of the rows that this rank steps and saves, of those with replicas too."""
    return ((row, row_id) for row, row_id in enumerate(ownership.row_ids) if ownership.owns[row])


def _writes(ownership: Ownership) -> bool:
    """Whether this rank saves its rows: the first of its expert data-parallel group does."""
    if ownership.groups.ep_size == 1:
        return is_main()
    replicas = ownership.groups.expert_dp_group
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
                weight, state = split_key(name, key)
                if state is None:
                    self.weights[weight] = file, key
                else:
                    self.states.setdefault(weight, {})[state] = file, key

    def known(self) -> set[str]:
        """Every weight of which the files hold a value or a state."""
        return {*self.weights, *self.states}

    def rows_of(self, parameter: str) -> list[int]:
        """The ids of the rows of `parameter`."""
        pattern = re.compile(re.escape(parameter) + r"/(\d+)")
        return sorted(int(match[1]) for match in map(pattern.fullmatch, self.weights) if match)

    def describe(self, weight: str) -> str:
        """Type and shape, without reading the tensor."""
        file, key = self.weights[weight]
        piece = file.get_slice(key)
        shape = tuple(piece.get_shape())
        return describe_tensor(shape, (piece[:0] if shape else file.get_tensor(key)).dtype)

    def describe_row(self, parameter: str) -> str:
        """Type and shape of one row."""
        dtype, _, shape = self.describe(f"{parameter}/{self.rows_of(parameter)[0]}").partition("[1")
        return f"{dtype}[{shape.removeprefix(', ')}"

    def weight(self, weight: str) -> Tensor:
        """The value of `weight`, or of one row, `<parameter>/<row id>`. Raises KeyError where no file holds it."""
        file, key = self.weights[weight]
        return file.get_tensor(key)

    def state(self, weight: str) -> dict[str, Tensor]:
        """The optimizer states of `weight`, or of one row, by name; empty where no file holds any."""
        return {name: file.get_tensor(key).clone() for name, (file, key) in self.states.get(weight, {}).items()}

    def oddity(self, weight: str, shape: torch.Size, *, is_fused: bool = False) -> str | None:
        """Why the optimizer states of `weight`, or of one row, cannot be those of a weight of that shape, as half a
        sentence. Those of a fused optimizer are numbers, or have its shape."""
        states = self.state(weight)
        for key, value in states.items():
            if value.shape != shape and ((is_fused and value.ndim) or sorted(value.shape) == sorted(shape)):
                return f"its {key!r} of {weight!r} has shape {tuple(value.shape)} where the weight has {tuple(shape)}"
        named = ((f"its {key!r} of {weight!r}", value) for key, value in states.items())
        return None if (found := first_not_finite(named)) is None else f"{found} is not finite"

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()


def split_key(file: str, key: str) -> tuple[str, str | None]:
    """The weight that the tensor `key` of `file` belongs to, and which of its optimizer states it is, if any."""
    if file == MODEL:
        return key, None
    if file == OPTIMIZER:
        weight, _, state = key.rpartition(".")
        return weight, state
    match = re.fullmatch(r"(.+/\d+)(?:/([^/]+))?", key)
    return (match[1], match[2]) if match else (key, None)


def targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Key -> the tensor of `model` to load it into, for this rank's weights."""
    for name, parameter in model.named_parameters():
        ownership = ownership_of(parameter)
        if ownership is None:
            yield name, parameter
        else:
            for row, row_id in _held(ownership):
                yield f"{name}/{row_id}", parameter.detach()[row : row + 1]
    yield from _buffers(model)


def adopt_places(model: nn.Module, places: Mapping[str, Mapping[str, Any]]) -> None:
    """Have each parameter's rows where `describe_places` found them, where as many ranks have as many rows."""
    for name, parameter in model.named_parameters():
        ownership = ownership_of(parameter)
        if ownership is not None and ownership.holder is not None and name in places:
            ownership.holder.adopt(places[name]["slots"])


def load_model(model: nn.Module, tensors: SavedTensors) -> None:
    """Copy this rank's weights into `model`, in place."""
    with torch.no_grad():
        for weight, target in targets(model):
            value = tensors.weight(weight)
            target.copy_(spread_like(target, value) if isinstance(target, DTensor) else value)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: SavedTensors) -> None:
    """Give `optimizer` the saved states of its parameters; the settings of its groups stay its own."""
    optimizer = unwrapped(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    packed = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = (_load_state(names[parameter], parameter, tensors) for parameter in parameters)
    packed["state"] = {index: with_numbers(state) for index, state in enumerate(states) if state}
    optimizer.load_state_dict(packed)


def with_numbers(state: dict[str, Tensor]) -> dict[str, Any]:
    """Returns what `tensors_of` was given."""
    return {key.removesuffix(NUMBER): v.item() if key.endswith(NUMBER) else v for key, v in state.items()}


def _load_state(name: str, parameter: nn.Parameter, tensors: SavedTensors) -> dict[str, Tensor]:
    """The optimizer's state of one parameter: as saved, or put together from the rows that this rank owns."""
    ownership = ownership_of(parameter)
    if ownership is None:
        state = tensors.state(name)
        if isinstance(parameter, DTensor):
            return {key: spread_like(parameter, v) if v.shape == parameter.shape else v for key, v in state.items()}
        return {key: _strided_like(parameter, v) if v.shape == parameter.shape else v for key, v in state.items()}
    state = {}
    rows = {row_id: row for row, row_id in _owned(ownership)}
    # A rank that owns nothing may do so after the next migration: it needs what rows share, and state of their shape.
    for row_id in rows or tensors.rows_of(name)[:1]:
        for key, value in tensors.state(f"{name}/{row_id}").items():
            if value.ndim == 0:
                # Rows may differ in their number of steps: the largest corrects the moments' bias the least.
                state[key] = torch.maximum(state.get(key, value), value)
                continue
            whole = state.setdefault(key, value.new_zeros(len(ownership.row_ids), *value.shape[1:]))
            if row_id in rows:
                whole[rows[row_id]] = value[0]
    return state


def _strided_like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """`value` with the parameter's memory format. A fused optimizer goes through both as they lie in memory: of a
    convolution in channels_last it would pair weights with the moments of others."""
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Such as float32[4, 16]."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
