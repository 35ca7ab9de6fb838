"""The tensors of a checkpoint, read from and written to a model.

Replicas of a row are saved once, by the row's owner. A rank reads its rows by uid from whichever file holds them, so a
checkpoint loads under any world size and any placement, one tensor at a time. Parameters that FSDP2 shards as a
`DTensor` are gathered one at a time for saving, and sharded again when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.collectives import gather_objects, is_main, rank
from toolkit.experts.parallel.optimizer_rows import require_rows, unwrapped
from toolkit.experts.parallel.ownership import Ownership, is_dtensor, local_rows, ownership_of, whole
from toolkit.experts.placement.placement import EMPTY_ROW
from toolkit.experts.state.keys import MODEL, NUMBER, OPTIMIZER, ROW, ROWS, weight_of_key

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FileContents = dict[str, dict[str, Tensor]]
"""File name -> key -> tensor on the CPU."""

ToCPU = Callable[[str, Tensor], Tensor]
"""Maps a key and its detached tensor to the tensor that is written."""


def on_cpu(key: str, tensor: Tensor) -> Tensor:  # noqa: ARG001
    """Return `tensor` in CPU memory, itself if it is there."""
    return tensor.cpu().contiguous()


# --- out of a model ----------------------------------------------------------------------------------------------


def tensors_to_write(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], to_cpu: ToCPU = on_cpu
) -> FileContents:
    """Return the file contents of this rank. A collective, because sharded tensors are gathered."""
    rows_file = ROWS.format(rank=rank())
    files: FileContents = {MODEL: dict(_buffers(model)) if is_main() else {}, OPTIMIZER: {}, rows_file: {}}
    states = {parameter: state for each in optimizers for parameter, state in unwrapped(each).state.items()}
    for name, parameter in model.named_parameters():
        state = _as_tensors(name, states.get(parameter, {}))
        ownership = ownership_of(parameter)
        if ownership is None:
            moments = [(OPTIMIZER, f"{name}.{key}", value) for key, value in state.items()]
            for file, key, value in [(MODEL, name, parameter), *moments]:
                gathered = whole(value)
                if is_main():  # a gathered tensor at once, so that no device holds two
                    files[file][key] = value if gathered is value else gathered.cpu()
            continue
        for key, value in [("", parameter), *state.items()]:
            gathered = whole(require_rows(name, key, value, parameter) if value.ndim else value)
            if not ownership.groups.is_in_first_group:
                continue
            if gathered is not value:
                gathered = gathered.cpu()
            for uid, row in _owned(ownership).items():
                # Shared state, such as Adam's step, is saved with each row, because rows can load on other ranks.
                rows = gathered[row : row + 1] if value.ndim else value.clone()
                files[rows_file][f"{name}/{uid}/{key}".removesuffix("/")] = rows
    return {
        file: {key: to_cpu(f"{file}/{key}", tensor.detach()) for key, tensor in tensors.items()}
        for file, tensors in files.items()
        if tensors or (is_main() and file == MODEL)
    }


def _as_tensors(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The optimizer state of the parameter `name` as tensors: Python numbers have one element and a marked key."""
    tensors = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        elif isinstance(value, int | float):
            tensors[key + NUMBER] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        elif value is not None:
            raise UserError(
                f"optimizer: its state {key!r} of {name!r} is a {type(value).__name__}, which a checkpoint cannot "
                "hold. Use an optimizer whose states are tensors and numbers."
            )
    return tensors


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The optimizer states of this rank that are tensors, each with a description."""
    states = unwrapped(optimizer).state
    for name, parameter in model.named_parameters():
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer state {key!r} of {name!r}", value


def first_not_finite(
    tensors: Iterable[tuple[str, Tensor]], is_right: Callable[[Tensor], Tensor] = torch.isfinite
) -> str | None:
    """The name of the first tensor with an element that is not `is_right`. One host sync for all tensors."""
    all_local = ((name, local_rows(tensor)) for name, tensor in tensors)
    floating = [(name, local.detach()) for name, local in all_local if local.is_floating_point()]
    if not floating:
        return None
    # If the sum is finite, all elements are; the sum takes a tenth of the time of a look at each.
    sums = [local.sum(dtype=torch.promote_types(local.dtype, torch.float32)) for _, local in floating]
    device = next((total.device for total in sums if total.device.type != "cpu"), sums[0].device)
    finite = torch.stack([total.isfinite().to(device) for total in sums]).tolist()
    suspects = (each for each, is_finite in zip(floating, finite, strict=True) if not is_finite)
    return next((name for name, local in suspects if not is_right(local).all()), None)


def describe_places(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Parameter -> the uids of its rows, in the order of slots, on each rank of an EP group. A collective."""
    owned = {name: ownership for name, p in model.named_parameters() if (ownership := ownership_of(p)) is not None}
    of_ranks = gather_objects({name: list(ownership.row_ids) for name, ownership in owned.items()})
    # All EP groups hold the same.
    return {
        name: {"slots": [of_ranks[rank][name] for rank in ownership.groups.ep_groups[0]]}
        for name, ownership in owned.items()
    }


def describe_tied(model: nn.Module) -> dict[str, str]:
    """Further name of a tied parameter, such as a head's -> its name in the files."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[parameter] for name, parameter in every if name != names[parameter]}


def list_rows(files: FileContents) -> dict[str, dict[str, list[int]]]:
    """File name -> parameter -> the uids of its rows in the file."""
    rows: dict[str, dict[str, list[int]]] = {}
    for file in files.keys() - {MODEL, OPTIMIZER}:
        for match in filter(None, map(ROW.fullmatch, files[file])):
            if match["state"] is None:
                rows.setdefault(file, {}).setdefault(match["parameter"], []).append(int(match["uid"]))
    return rows


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict would hold."""
    persistent = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _owned(ownership: Ownership) -> dict[int, int]:
    """uid -> row of the rows that this rank steps and saves."""
    return {uid: row for row, uid in enumerate(ownership.row_ids) if ownership.owns[row]}


# --- into a model ------------------------------------------------------------------------------------------------


class SavedTensors(ExitStack):
    """The tensors of a checkpoint, read from the disk one by one when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, tuple[Any, str]] = {}
        """Weight, or row "<parameter>/<uid>" -> its file and key."""
        self.states: dict[str, dict[str, tuple[Any, str]]] = {}
        """Weight or row -> its optimizer states by name."""
        self.uids: dict[str, list[int]] = {}
        """Parameter -> the uids of its rows, in order."""

    def open(self, path: Path, names: Iterable[str]) -> None:
        """Open the tensor files among `names` in `path`, and list their keys."""
        for name in (name for name in names if name.endswith(".safetensors")):
            file = self.enter_context(safe_open(path / name, "pt"))
            for key in file.keys():  # noqa: SIM118 (not a dict)
                weight, state = weight_of_key(name, key)
                if state is not None:
                    self.states.setdefault(weight, {})[state] = file, key
                    continue
                self.weights[weight] = file, key
                if name != MODEL and (match := ROW.fullmatch(weight)):
                    self.uids.setdefault(match["parameter"], []).append(int(match["uid"]))
        self.uids = {parameter: sorted(uids) for parameter, uids in self.uids.items()}

    def describe(self, weight: str) -> str:
        """Type and shape, without reading the tensor."""
        file, key = self.weights[weight]
        piece = file.get_slice(key)
        shape = tuple(piece.get_shape())
        return describe_tensor(shape, (piece[:0] if shape else file.get_tensor(key)).dtype)

    def weight(self, weight: str) -> Tensor:
        """The value of `weight` or of one row."""
        file, key = self.weights[weight]
        value: Tensor = file.get_tensor(key)
        return value

    def state(self, weight: str) -> dict[str, Tensor]:
        """The optimizer states of `weight` or of one row, by name; empty if there are none."""
        return {name: file.get_tensor(key).clone() for name, (file, key) in self.states.get(weight, {}).items()}


def targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weight or row -> the tensor of `model` to load it into, for this rank's weights."""
    for name, parameter in model.named_parameters():
        ownership = ownership_of(parameter)
        if ownership is None:
            yield name, parameter
            continue
        for row, uid in enumerate(ownership.row_ids):
            if uid != EMPTY_ROW:
                yield f"{name}/{uid}", parameter.detach()[row : row + 1]
    yield from _buffers(model)


def mismatches(model: nn.Module, tensors: SavedTensors) -> list[str]:
    """Weights of this rank that `tensors` lacks or has in another type or shape, each as half a sentence."""
    lines = []
    for weight, target in targets(model):
        here = describe_tensor(tuple(target.shape), target.dtype)
        if weight not in tensors.weights:
            lines.append(f"it lacks {weight!r}")
        elif (there := tensors.describe(weight)) != here:
            lines.append(f"its {weight!r} is {there} and this run's is {here}")
    return lines


def adopt_places(model: nn.Module, places: Mapping[str, Mapping[str, Any]]) -> None:
    """Place the rows of each parameter as `describe_places` found them, with the same number of ranks and slots."""
    stack_of = {parameter: stack for stack in expert_stacks(model).values() for parameter in stack.parameters.values()}
    for name, parameter in model.named_parameters():
        if parameter in stack_of and name in places:
            stack_of[parameter].adopt(places[name]["slots"])


def shard_like(like: DTensor, tensor: Tensor) -> DTensor:
    """Shard `tensor` like `like`, without communication: each rank has all of it."""
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    assert is_dtensor(part)
    return part


def load_model(model: nn.Module, tensors: SavedTensors) -> None:
    """Copy this rank's weights into `model`, in place."""
    with torch.no_grad():
        for weight, target in targets(model):
            value = tensors.weight(weight)
            target.copy_(shard_like(target, value) if is_dtensor(target) else value)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: SavedTensors) -> None:
    """Give `optimizer` the saved states of its parameters; the settings of its groups stay its own."""
    optimizer = unwrapped(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    packed = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = (_load_state(names[parameter], parameter, tensors) for parameter in parameters)
    packed["state"] = {
        index: {key.removesuffix(NUMBER): v.item() if key.endswith(NUMBER) else v for key, v in state.items()}
        for index, state in enumerate(states)
        if state
    }
    optimizer.load_state_dict(packed)


def _load_state(name: str, parameter: nn.Parameter, tensors: SavedTensors) -> dict[str, Tensor]:
    """The optimizer state of one parameter: as saved, or assembled from the rows that this rank owns."""
    ownership = ownership_of(parameter)
    if ownership is None:
        state = tensors.state(name)
    else:
        state, rows = {}, _owned(ownership)
        # A rank without rows can get one in the next migration: it needs the shared state, and states of the right
        # shape.
        for uid in rows or tensors.uids.get(name, [])[:1]:
            for key, value in tensors.state(f"{name}/{uid}").items():
                if value.ndim == 0:
                    # Rows can differ in their number of steps: the largest corrects the bias of moments the least.
                    state[key] = torch.maximum(state.get(key, value), value)
                    continue
                of_all = state.setdefault(key, value.new_zeros(len(ownership.row_ids), *value.shape[1:]))
                if uid in rows:
                    of_all[rows[uid]] = value[0]
    return {key: _placed_like(parameter, v) if v.shape == parameter.shape else v for key, v in state.items()}


def _placed_like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return `value` with the sharding or memory format of `parameter`. A fused optimizer pairs both as they lie in
    memory: for a channels_last convolution it would pair weights with the moments of other weights."""
    if is_dtensor(parameter):
        return shard_like(parameter, value)
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Describe a tensor like float32[4, 16]."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
