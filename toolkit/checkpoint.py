"""Checkpoints: saved together, verified, and free of any layout of ranks.

    checkpoints/step-00000100/
        *.safetensors    weights and optimizer states, see `toolkit.tensor_files`
        state.json       step, metric sums, callbacks, results, the configuration
        manifest.json    format, step, world, who wrote which rows, size and SHA-256 of every file

How a folder gets written, so that it is complete or not there, is in `toolkit.manifest`. Safetensors and JSON only:
loading runs no code.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from toolkit import manifest
from toolkit.config import NOT_OF_THE_TRAJECTORY, to_dict
from toolkit.errors import UserError
from toolkit.tensor_files import (
    FileContents,
    SavedTensors,
    describe_tensor,
    files_to_write,
    list_rows,
    load_model,
    load_optimizer,
    targets,
    unwrapped,
)
from toolkit.tracking.secrets import mask

if TYPE_CHECKING:
    from toolkit.run import Run

FORMAT = 1
STATE = "state.json"

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

    `model` is not wrapped. Returns the new folder; or None, after one line of warning, where it could not be written
    on some rank: then everything older is as it was.
    """
    step = state["step"]
    final = folder / f"step-{step:08d}"
    writing = folder / (manifest.WRITING + final.name)
    if run.agree(lambda: final.exists() and manifest.find_damage(final) is None):
        return final
    files = files_to_write(model, optimizer, run)
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


def _write(
    writing: Path, files: FileContents, content: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, dict[str, list[int]]]]:
    """Write this rank's files; returns their seals, and which rows of which parameter each holds."""
    for name, tensors in files.items():
        save_file(tensors, writing / name)
    names = list(files)
    if content is not None:
        manifest.write_json(writing / STATE, content)
        names.append(STATE)
    return {name: manifest.seal(writing / name) for name in names}, list_rows(files)


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


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, Any]:
    """Put the checkpoint at `path`, which verifies, into `model` and `optimizer`; returns the `state` saved with it.

    A collective. Raises UserError on every rank, before any tensor is touched, where the checkpoint is of another
    format, configuration or model.
    """
    about, saved = run.agree(lambda: _read(path))
    with SavedTensors() as tensors:

        def compare() -> tuple[list[str], set[str]]:
            tensors.open(path, about["files"])
            return _differences(saved, model, optimizer, tensors, run), {weight for weight, _ in targets(model)}

        try:
            answers = _together(compare)
        except OSError as error:
            raise UserError(
                f"checkpoint {path} cannot be read ({error}): every machine must see this folder."
            ) from None
        strangers = tensors.known() - {weight for _, wanted in answers for weight in wanted}
        lines = [line for found, _ in answers for line in found] + [
            f"it holds {weight!r}" for weight in sorted(strangers)
        ]
        if lines := list(dict.fromkeys(lines)):
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            raise UserError(
                f"checkpoint {path} does not fit this run: {lines[0]}{more}: "
                "use the settings it was made with, or another --run-dir."
            )
        load_model(model, tensors)
        load_optimizer(model, optimizer, tensors)
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
    saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, tensors: SavedTensors, run: Run
) -> list[str]:
    """What keeps this rank from using the checkpoint, each as half a sentence."""
    then, now = saved["config"], _trajectory(run)
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
    for weight, target in targets(model):
        here = describe_tensor(tuple(target.shape), target.dtype)
        if weight not in tensors.weights:
            lines.append(f"it lacks {weight!r}")
        elif (there := tensors.describe(weight)) != here:
            lines.append(f"its {weight!r} is {there} and this run's is {here}")
    return lines


def _describe(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scaler = getattr(optimizer, "scaler", None)
    return {"name": type(unwrapped(optimizer)).__name__, "scaler": None if scaler is None else scaler.state_dict()}


def _trajectory(run: Run) -> dict[str, Any]:
    """The settings that decide what is learned."""
    return {name: value for name, value in mask(to_dict(run.config)).items() if name not in NOT_OF_THE_TRAJECTORY}


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
    said = None if failure is None else (isinstance(failure, (OSError, SafetensorError)), str(failure))
    outcomes = _gather((result, said))
    failures = [(*said, rank) for rank, (_, said) in enumerate(outcomes) if said is not None]
    if failures:
        by_disk, message, rank = min(failures)  # a bug comes before a full disk, which may be its consequence
        where = f" on rank {rank}" if len(outcomes) > 1 else ""
        raise (OSError if by_disk else RuntimeError)(message + where) from failure
    return [result for result, _ in outcomes]  # type: ignore[misc]


def _on_main(run: Run, work: Callable[[], None]) -> None:
    _together(lambda: work() if run.is_main else None)


def _free(folder: Path) -> int:
    """Bytes that can be written where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
