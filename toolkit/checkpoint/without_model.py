"""Checkpoints verified and exported without their model, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from toolkit.errors import UserError
from toolkit.experts.state import manifest
from toolkit.experts.state.tensor_files import SavedTensors


def read_verified(folder: Path) -> dict[str, Any]:
    """Returns the manifest of the checkpoint `folder`. Raises UserError if a byte is not as it was written."""
    if damage := manifest.find_damage(folder):
        raise UserError(f"{folder}: is damaged: {damage}. Use an older checkpoint.")
    return manifest.read_manifest(folder)


def export(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write the weights of a checkpoint to one safetensors file, as the state dict of the model in one process.

    Experts are stacked in the order of their uids. Tied parameters are written under each of their names. The memory
    needed is the size of the weights.

    Args:
        source: The checkpoint.
        target: The file.
        dtype: Type of floating point tensors. Default: as saved.

    Raises:
        UserError: If `source` is damaged or `target` exists.
    """
    about = read_verified(source)
    if target.exists():
        raise UserError(f"{target}: exists already. Choose another name.")
    writing = target.with_name(manifest.WRITING + target.name)

    def read(tensors: SavedTensors, weight: str) -> Tensor:
        value = tensors.weight(weight)
        return value.to(dtype) if value.is_floating_point() else value

    with SavedTensors() as tensors:
        tensors.open(source, about["files"])
        rows = {name: [f"{name}/{uid}" for uid in uids] for name, uids in tensors.uids.items()}
        in_rows = {row for of in rows.values() for row in of}
        weights = {name: read(tensors, name) for name in tensors.weights if name not in in_rows}
        weights |= {name: torch.cat([read(tensors, row) for row in of]) for name, of in rows.items()}
        weights |= {name: weights[first].clone() for name, first in about.get("tied", {}).items()}
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(weights, writing, metadata={"format": "pt"})
            manifest.seal(writing)
            writing.rename(target)
        finally:
            writing.unlink(missing_ok=True)
