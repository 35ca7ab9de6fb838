"""Checkpoints described and exported without their model, in one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from toolkit.errors import UserError, one_line
from toolkit.experts.state import manifest
from toolkit.experts.state.tensor_files import SavedTensors

RowIds = dict[str, list[list[int]]]
"""Parameter -> the row ids of each rank of an EP group."""


def read_verified(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint `folder`. Raises UserError where a byte is not as it was written."""
    if damage := manifest.find_damage(folder):
        raise UserError(f"checkpoint {folder} is damaged: {damage}: use an older one.")
    return manifest.read_manifest(folder)


def row_places(about: dict[str, Any]) -> RowIds:
    """The rows that each rank held when they were saved; in manifests without a placement, those that it wrote."""
    if "placement" in about:
        return {name: place["slots"] for name, place in about["placement"].items()}
    places: RowIds = {}
    for _, rows in sorted(about["rows"].items()):
        for name, ids in rows.items():
            places.setdefault(name, []).append(ids)
    return places


def layers(places: RowIds) -> dict[str, list[str]]:
    """Module -> those of its parameters that have rows."""
    found: dict[str, list[str]] = {}
    for name in places:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def describe(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Returns what the checkpoint `folder` holds, as plain JSON values."""
    places = row_places(about)
    with SavedTensors() as tensors:
        tensors.open(folder, about["files"])
        rows = {f"{name}/{row_id}" for name in places for row_id in tensors.rows_of(name)}
        found = {
            layer: {
                "experts": len(tensors.rows_of(names[0])),
                "slots": places[names[0]],
                "rows": {name.rpartition(".")[2]: tensors.describe_row(name) for name in names},
                "states": sorted(tensors.states.get(f"{names[0]}/{tensors.rows_of(names[0])[0]}", ())),
            }
            for layer, names in layers(places).items()
        }
        replicated = len(tensors.weights.keys() - rows)
    return {
        "step": about["step"],
        "format": about["format"],
        "processes": about["world_size"],
        "files": {name: seal["bytes"] for name, seal in sorted(about["files"].items())},
        "replicated_tensors": replicated,
        "layers": found,
    }


def export(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write the weights of `source` to the file `target`, rows stacked in the order of their ids; no moments.

    A parameter of several names, such as a tied head, is there under each, as in a state dict.

    It takes as much memory as the weights. `dtype` is given to floating point tensors. Raises UserError where `source`
    is damaged, or `target` exists or cannot be written.
    """
    about = read_verified(source)
    with SavedTensors() as tensors, new_target(target) as writing:
        tensors.open(source, about["files"])
        weights = whole_weights(tensors, row_places(about), lambda tensor: _cast(tensor, dtype))
        weights |= {name: weights[first].clone() for name, first in about.get("tied", {}).items()}
        save_file(weights, writing / target.name, metadata={"format": "pt"})
        manifest.seal(writing / target.name)
        (writing / target.name).rename(target)


def whole_weights(
    tensors: SavedTensors, places: RowIds, take: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights by name, rows stacked in the order of their ids; each tensor is what `take` makes of it."""
    rows = {name: [f"{name}/{row_id}" for row_id in tensors.rows_of(name)] for name in places}
    in_rows = {weight for keys in rows.values() for weight in keys}
    weights = {name: take(tensors.weight(name)) for name in tensors.weights if name not in in_rows}
    return weights | {name: torch.cat([take(tensors.weight(key)) for key in keys]) for name, keys in rows.items()}


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


@contextmanager
def new_target(target: Path) -> Iterator[Path]:
    """A temporary folder to write `target` in, which is deleted at the end.

    Raises UserError where `target` exists, or cannot be written.
    """
    if target.exists():
        raise UserError(f"{target} exists already: choose another name.")
    if file := next((parent for parent in target.parents if os.path.lexists(parent) and not parent.is_dir()), None):
        raise UserError(f"{target} cannot be written, because {file} is no folder: choose another name.")
    writing = target.with_name(manifest.WRITING + target.name)
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        yield writing
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{target} could not be written ({reason}): make room, or write elsewhere.") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
