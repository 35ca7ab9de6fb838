"""Checkpoints: saved together, verified, and free of any layout of ranks.

    checkpoints/step-00000100/
        model.safetensors           copied parameters and buffers, by name; from the main process
        optimizer.safetensors       their optimizer rows, "<parameter>.<state>"
        experts-00000.safetensors   rows with stable ids, from each rank that owns some: "<parameter>/<id>" and
        experts-00001.safetensors   "<parameter>/<id>/<state>"; each keeps its row dimension of 1
        state.json                  step, metric sums, callbacks, the configuration
        manifest.json               format, step, world, who wrote which rows, size and SHA-256 of every file

A rank reads its rows by id from whichever file has them, so what one number of processes or one placement saved,
another can load. Safetensors and JSON only: loading runs no code. How a folder gets written is in `toolkit.manifest`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from toolkit import manifest
from toolkit.config import NOT_OF_THE_TRAJECTORY, to_dict
from toolkit.errors import UserError
from toolkit.parallel import EMPTY_ROW, Sharding, sharding_of
from toolkit.tracking.secrets import mask

if TYPE_CHECKING:
    from toolkit.run import Run

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"

T = TypeVar("T")


# --- saving ------------------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    run: Run,
) -> Path | None:
    """Write step `state["step"]` under `folder` and delete all but the newest `keep`. A collective.

    `model` is not wrapped. Returns the new folder; or None, after
    one line of warning, where it could not be written on some rank: then everything older is as it was.
    """
    step = state["step"]
    final = folder / f"step-{step:08d}"
    writing = folder / (manifest.WRITING + final.name)
    if run.agree(lambda: final.exists() and manifest.find_damage(final) is None):
        return final
    files = _files(model, optimizer, run)
    config = _trajectory(run)
    content = {"training": state, "config": config, "optimizer": _describe(optimizer)}
    needed = sum(_together(lambda: sum(t.nbytes for tensors in files.values() for t in tensors.values())))
    try:
        _on_main(run, lambda: _make_room(writing, needed))
        reports = _together(lambda: _write(writing, files, content if run.is_main else None))
        about = {
            "format": FORMAT,
            "step": step,
            "world_size": run.world_size,
            "config_digest": manifest.digest(config),
            "files": {name: seal for sealed, _ in reports for name, seal in sealed.items()},
            "rows": {name: rows for _, by_file in reports for name, rows in by_file.items()},
        }
        _on_main(run, lambda: _publish(writing, final, about))
    except OSError as error:
        if run.is_main:
            shutil.rmtree(writing, ignore_errors=True)
            run.say(
                f"warning: no checkpoint at step {step}: {error}; {needed:,} bytes needed, {_free(folder):,} free in "
                f"{folder}; older checkpoints are untouched, training goes on."
            )
        return None
    if run.is_main:
        _prune(folder, step, keep, run)
    return final


def _files(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, dict[str, Tensor]]:
    """What this rank writes: file name -> key -> tensor."""
    copied: dict[str, Tensor] = dict(_buffers(model)) if run.is_main else {}
    moments: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    states = _inner(optimizer).state
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
    files = {MODEL: copied, OPTIMIZER: moments, f"experts-{run.rank:05d}.safetensors": rows}
    return {
        file: {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
        for file, tensors in files.items()
        if tensors or (run.is_main and file == MODEL)
    }


def _write(
    writing: Path, files: dict[str, dict[str, Tensor]], content: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write this rank's files; returns their seals, and which rows of which parameter each holds."""
    for name, tensors in files.items():
        save_file(tensors, writing / name)
    names = list(files)
    if content is not None:
        manifest.write_json(writing / STATE, content)
        names.append(STATE)
    rows: dict[str, dict[str, list[int]]] = {}
    for name in files:
        for key in files[name]:
            if match := re.fullmatch(r"(.+)/(\d+)", key):
                rows.setdefault(name, {}).setdefault(match[1], []).append(int(match[2]))
    return {name: manifest.seal(writing / name) for name in names}, rows


def _make_room(writing: Path, needed: int) -> None:
    writing.parent.mkdir(parents=True, exist_ok=True)
    manifest.sweep(writing.parent)
    if needed > _free(writing.parent):
        raise OSError("the disk is full")
    writing.mkdir()


def _publish(writing: Path, final: Path, about: dict[str, Any]) -> None:
    manifest.publish(writing, final, about)
    if damage := manifest.find_damage(final):
        manifest.remove(final)
        raise OSError(f"{damage} when read back")


def _prune(folder: Path, step: int, keep: int, run: Run) -> None:
    """Delete all but the newest `keep` up to `step`, which verifies. Later ones did not verify, or do not exist."""
    try:
        for path in [path for path in _newest_first(folder) if step_of(path) <= step][keep:]:
            manifest.remove(path)
    except OSError as error:
        run.say(f"warning: an old checkpoint could not be deleted ({error}); training goes on.")


# --- finding -----------------------------------------------------------------------------------------------------


def find_checkpoint(folder: Path, run: Run) -> Path | None:
    """The newest checkpoint under `folder` that verifies, or None; says what it passes over. A collective."""

    def newest() -> Path | None:
        for path in _newest_first(folder):
            damage = manifest.find_damage(path)
            if damage is None and (step := manifest.read_manifest(path)["step"]) != step_of(path):
                damage = f"its files are those of step {step}"
            if damage is None:
                return path
            run.say(f"warning: checkpoint {path.name} is passed over: {damage}.")
        return None

    return run.agree(newest)


def _newest_first(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that the checkpoint `path` is of."""
    return int(path.name.removeprefix("step-"))


# --- loading -----------------------------------------------------------------------------------------------------


class _Tensors:
    """The tensors of a checkpoint, read when asked for: weights by key, and each weight's optimizer states."""

    def __init__(self, path: Path, names: Iterable[str], stack: ExitStack):
        self.weights: dict[str, tuple[Any, str]] = {}
        self.states: dict[str, dict[str, tuple[Any, str]]] = {}
        for name in names:
            if not name.endswith(".safetensors"):
                continue
            file = stack.enter_context(safe_open(path / name, "pt"))
            for key in file.keys():  # noqa: SIM118 (not a dict)
                weight, state = _split(name, key)
                if state is None:
                    self.weights[weight] = file, key
                else:
                    self.states.setdefault(weight, {})[state] = file, key

    def describe(self, weight: str) -> str:
        file, key = self.weights[weight]
        piece = file.get_slice(key)
        shape = tuple(piece.get_shape())
        return _describe_tensor(shape, (piece[:0] if shape else file.get_tensor(key)).dtype)

    def weight(self, weight: str) -> Tensor:
        file, key = self.weights[weight]
        return file.get_tensor(key)

    def state(self, weight: str) -> dict[str, Tensor]:
        return {name: file.get_tensor(key).clone() for name, (file, key) in self.states.get(weight, {}).items()}


def _split(file: str, key: str) -> tuple[str, str | None]:
    """The weight that the tensor `key` of `file` belongs to, and which of its optimizer states it is, if any."""
    if file == MODEL:
        return key, None
    if file == OPTIMIZER:
        weight, _, state = key.rpartition(".")
        return weight, state
    match = re.fullmatch(r"(.+/\d+)(?:/([^/]+))?", key)
    return (match[1], match[2]) if match else (key, None)


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, Any]:
    """Put the checkpoint at `path`, which verifies, into `model` and `optimizer`; returns the `state` saved with it.

    A collective. Raises UserError on every rank, before any tensor is touched, where the checkpoint is of another
    format, configuration or model.
    """
    about, saved = run.agree(lambda: _read(path))
    with ExitStack() as stack:
        tensors = _Tensors(path, about["files"], stack)
        targets = dict(_targets(model))
        found = _differences(saved, _trajectory(run), optimizer, targets, tensors)
        everyones = _gather((found, list(targets)))
        known = {weight for _, weights in everyones for weight in weights}
        unknown = [f"it holds {weight!r}" for weight in sorted((tensors.weights | tensors.states).keys() - known)]
        differences = list(dict.fromkeys([line for lines, _ in everyones for line in lines] + unknown))
        if differences:
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            raise UserError(
                f"checkpoint {path} does not fit this run: {differences[0]}{more}: "
                "use the settings it was made with, or another --run-dir."
            )
        with torch.no_grad():
            for weight, target in targets.items():
                target.copy_(tensors.weight(weight))
        _load_optimizer(model, _inner(optimizer), tensors)
    if saved["optimizer"]["scaler"] is not None:
        optimizer.scaler.load_state_dict(saved["optimizer"]["scaler"])  # type: ignore[attr-defined]
    return saved["training"]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    about = manifest.read_manifest(path)
    if about["format"] != FORMAT:
        raise UserError(
            f"checkpoint {path} has format {about['format']} and this version reads format {FORMAT}: "
            "use the version that wrote it, or another --run-dir."
        )
    return about, manifest.read_json(path / STATE)


def _differences(
    saved: dict[str, Any],
    config: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    targets: dict[str, Tensor],
    tensors: _Tensors,
) -> list[str]:
    """What keeps this rank from using the checkpoint, each as half a sentence."""
    then, now = saved["config"], config
    lines = [
        f"it was made with {field} {then.get(field)} and this run has {now.get(field)}"
        for field in sorted(then | now)
        if then.get(field) != now.get(field)
    ]
    then, now = saved["optimizer"], _describe(optimizer)
    if then["name"] != now["name"]:
        lines.append(f"it was made with the optimizer {then['name']} and this run has {now['name']}")
    if (then["scaler"] is None) != (now["scaler"] is None):
        lines.append(f"it was made {'without' if then['scaler'] is None else 'with'} fp16's loss scaling")
    for weight, target in targets.items():
        here = _describe_tensor(tuple(target.shape), target.dtype)
        if weight not in tensors.weights:
            lines.append(f"it lacks {weight!r}")
        elif (there := tensors.describe(weight)) != here:
            lines.append(f"its {weight!r} is {there} and this run's is {here}")
    return lines


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: _Tensors) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    packed = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = (_load_state(names[parameter], parameter, tensors) for parameter in parameters)
    packed["state"] = {index: state for index, state in enumerate(states) if state}
    optimizer.load_state_dict(packed)


def _load_state(name: str, parameter: nn.Parameter, tensors: _Tensors) -> dict[str, Tensor]:
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


# --- parameters, buffers and rows --------------------------------------------------------------------------------


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict would hold."""
    persistent = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _held(sharding: Sharding) -> Iterator[tuple[int, int]]:
    """(row, stable id) of the rows that hold something."""
    return ((row, row_id) for row, row_id in enumerate(sharding.row_ids) if row_id != EMPTY_ROW)


def _targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Where this rank wants the weight of each key to be put."""
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        if sharding is None:
            yield name, parameter
        else:
            for row, row_id in _held(sharding):
                yield f"{name}/{row_id}", parameter.detach()[row : row + 1]
    yield from _buffers(model)


def _writes(sharding: Sharding, run: Run) -> bool:
    """Whether this rank is the one, of those that hold the same rows, that saves them."""
    if sharding.groups.ep_size == 1:
        return run.is_main
    replicas = sharding.groups.replica_group
    return replicas is None or dist.get_rank(replicas) == 0


def _describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer within Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _trajectory(run: Run) -> dict[str, Any]:
    """The settings that decide what is learned."""
    return {name: value for name, value in mask(to_dict(run.config)).items() if name not in NOT_OF_THE_TRAJECTORY}


def _describe(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scaler = getattr(optimizer, "scaler", None)
    return {"name": type(_inner(optimizer)).__name__, "scaler": None if scaler is None else scaler.state_dict()}


# --- ranks -------------------------------------------------------------------------------------------------------


def _gather(value: T) -> list[T]:
    """`value` of every rank, in order of rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _together(work: Callable[[], T]) -> list[T]:
    """What `work` gave on every rank. Where it failed on one, all of them raise: OSError if the disk was the cause."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    io_error = isinstance(failure, (OSError, SafetensorError))
    outcomes = _gather((result, None if failure is None else (str(failure), io_error)))
    for rank, (_, said) in enumerate(outcomes):
        if said is not None:
            where = f" on rank {rank}" if len(outcomes) > 1 else ""
            raise (OSError if said[1] else RuntimeError)(f"{said[0]}{where}") from failure
    return [result for result, _ in outcomes]  # type: ignore[misc]


def _on_main(run: Run, work: Callable[[], None]) -> None:
    _together(lambda: work() if run.is_main else None)


def _free(folder: Path) -> int:
    """Bytes that can be written where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
