"""Checkpoints to and from the format of `torch.distributed.checkpoint` (DCP), which others read, in one process.

    model.<parameter or buffer>                whole; experts stacked in the order of their ids
    optimizer.state.<parameter>.<state>        of the same shape; or one number, where rows differ the largest
    optimizer.param_groups.<group>.<setting>   such as lr; `params` has names

These are the names of torch's `get_state_dict` of the model on one process, as "model" and "optimizer" of one dict.
Torch keeps the names in a pickle, which can execute code when it is read: import only folders that you trust.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from toolkit.checkpoint.without_model import RowIds, new_target, read_verified, row_places, whole_weights
from toolkit.errors import UserError, one_line
from toolkit.experts.state import manifest
from toolkit.experts.state.checkpoint_files import PARAMETERS, read
from toolkit.experts.state.tensor_files import SavedTensors, split_key, tensors_of, with_numbers


def export_dcp(source: Path, target: Path, *, with_optimizer: bool = True) -> None:
    """Write the weights of `source` to the DCP folder `target`, and states and settings of its optimizer.

    A parameter of several names, such as a tied head, is there under each, as in a state dict. It takes as much memory
    as what is written. Raises UserError where `source` is damaged, or `target` exists or cannot be written.
    """
    about = read_verified(source)
    with SavedTensors() as tensors, new_target(target) as writing, _quiet():
        tensors.open(source, about["files"])
        whole = _whole(tensors, row_places(about))
        whole["model"] |= {name: whole["model"][first] for name, first in about.get("tied", {}).items()}
        if with_optimizer:
            whole["optimizer"]["param_groups"] = _settings(read(source)[1]["optimizer"])
        else:
            del whole["optimizer"]
        dcp.save(whole, checkpoint_id=writing / target.name, no_dist=True)
        (writing / target.name).rename(target)


def import_dcp(source: Path, like: Path, target: Path) -> bool:
    """Write the checkpoint `target`: that of `like`, with the tensors of the DCP folder `source`. Step, metrics and the
    order of the data stay those of `like`.

    Returns whether there are optimizer states: `target` has none where `source` has none at all. Raises UserError where
    `source` is no DCP folder, is damaged or lacks a tensor of `like`, `like` is damaged, or `target` exists or cannot
    be written.
    """
    about = read_verified(like)
    places = row_places(about)
    there = _sizes(source)
    has_states = any(name.startswith("optimizer.state.") for name in there)
    with SavedTensors() as tensors, new_target(target) as writing, _quiet():
        tensors.open(like, about["files"])
        whole = _whole(tensors, places)
        if not has_states:
            del whole["optimizer"]
        for name, tensor in _named(whole):
            if there.get(name) != tuple(tensor.shape):
                what = f"has {name!r} of shape {there[name]}" if name in there else f"lacks {name!r}"
                raise UserError(
                    f"{source} {what}, which {like} has of shape {tuple(tensor.shape)}: import what was "
                    "trained with the same model."
                )
        try:
            dcp.load(whole, checkpoint_id=source, no_dist=True)
        except CheckpointException as error:  # of which the message is a trace
            cause = next((failure for failure, _ in error.failures.values()), error)
            raise UserError(
                f"{source} cannot be read ({one_line(cause)}): copy it here again, with all its files."
            ) from None
        rows = {f"{name}/{row_id}": (name, row) for name in places for row, row_id in enumerate(tensors.rows_of(name))}
        seals = {}
        for file in about["files"]:
            if file.endswith(".safetensors"):
                with safe_open(like / file, "pt") as opened:
                    parts = {key: _part(whole, rows, *split_key(file, key)) for key in opened.keys()}  # noqa: SIM118
                save_file({key: part for key, part in parts.items() if part is not None}, writing / file)
            else:
                shutil.copyfile(like / file, writing / file)
            seals[file] = manifest.seal(writing / file)
        manifest.publish(writing, target, about | {"files": seals})
    return has_states


def _whole(tensors: SavedTensors, places: RowIds) -> dict[str, dict[str, Any]]:
    """The weights by name, and optimizer states by name and state as the optimizer has them, experts stacked."""
    states: dict[str, dict[str, Tensor]] = {}
    in_rows = set()
    for name in places:
        keys = [f"{name}/{row_id}" for row_id in tensors.rows_of(name)]
        in_rows |= set(keys)
        of_rows = [tensors.state(key) for key in keys]
        if of_rows[0]:
            states[name] = {state: _stacked([each[state] for each in of_rows]) for state in of_rows[0]}
    states |= {name: tensors.state(name) for name in tensors.states if name not in in_rows}
    kept = {name: with_numbers(state) for name, state in states.items()}
    return {"model": whole_weights(tensors, places, Tensor.clone), "optimizer": {"state": kept}}


def _settings(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of the optimizer of a checkpoint, as `get_state_dict` has them: JSON has made lists of its tuples."""
    return [
        {key: tuple(value) if isinstance(value, list) and key != PARAMETERS else value for key, value in group.items()}
        for group in optimizer["groups"] or ()
    ]


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values[0].ndim else torch.stack(values).max()


def _named(whole: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, under the names that DCP gives."""
    for name, tensor in whole["model"].items():
        yield f"model.{name}", tensor
    for name, states in whole.get("optimizer", {}).get("state", {}).items():
        for state, value in states.items():
            if isinstance(value, Tensor):
                yield f"optimizer.state.{name}.{state}", value


def _part(
    whole: dict[str, dict[str, Any]], rows: dict[str, tuple[str, int]], weight: str, state: str | None
) -> Tensor | None:
    """Returns what a file of a checkpoint holds of `whole` under that key; None for a state where there are none."""
    if state is not None and "optimizer" not in whole:
        return None
    name, row = rows.get(weight, (weight, None))
    value = whole["model"][name] if state is None else tensors_of(name, whole["optimizer"]["state"][name])[state]
    if row is None:
        return value
    return value[row : row + 1] if value.ndim else value.clone()


def _sizes(source: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of what is in the DCP folder `source`, by name; that of a Python number is ()."""
    try:
        found = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
        return {name: tuple(getattr(about, "size", ())) for name, about in found.items()}
    except Exception as error:  # whatever reading a pickle may raise
        raise UserError(
            f"{source} cannot be read as a DCP folder ({one_line(error)}): give one that holds .metadata."
        ) from None


def _quiet() -> warnings.catch_warnings:
    """Torch warns that one process saves alone, which is what is wanted."""
    return warnings.catch_warnings(action="ignore")
