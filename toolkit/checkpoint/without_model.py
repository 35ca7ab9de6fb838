"""Checkpoint verification and export without the model, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from toolkit.errors import UserError, reading
from toolkit.experts.state import manifest
from toolkit.experts.state.tensor_files import SavedTensors
from toolkit.progress_bar import progress


def read_verified(folder: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint `folder`. Raises UserError if a file is damaged."""
    if damage := manifest.find_damage(folder):
        raise UserError(f"{folder}: is damaged: {damage}. Use an older checkpoint.")
    return manifest.read_manifest(folder)


def export(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write the weights of a checkpoint to one safetensors file: the state dict of the model in one process.

    Experts are stacked in uid order. Tied parameters are written under each of their names. Peak memory is the size of
    the weights.

    Args:
        source: Checkpoint.
        target: Output file.
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
        bar.update()
        return value.to(dtype) if value.is_floating_point() else value

    with SavedTensors() as tensors:
        with reading(source, "Use an older checkpoint."):
            tensors.open(source, about["files"])
            bar = tensors.enter_context(progress(len(tensors.weights) + 1, "exporting"))
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
