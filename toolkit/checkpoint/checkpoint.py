"""Checkpoints of a run: saving with retention and copies, and loading with the same settings and data.

The files are in `checkpoints/step-00000100/` of the run folder (`toolkit.experts.state.checkpoint_files`). state.json
has step, metric sums, callbacks, results, the configuration and the identity of the data.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.checkpoint.background import Write
from toolkit.checkpoint.finding import put_checkpoint
from toolkit.checkpoint.retention import best_step, drop_older, prune
from toolkit.experts.parallel.collectives import together
from toolkit.experts.state import manifest
from toolkit.experts.state.checkpoint_files import begin_save, load_tensors, read
from toolkit.experts.state.tensor_files import ToCPU, on_cpu
from toolkit.run.config.run import to_dict
from toolkit.run.config.settings import LENGTH, decides_what_is_learned
from toolkit.run.data import other_data
from toolkit.run.folder import DATA

if TYPE_CHECKING:
    from toolkit.run.run import Run

# --- saving ------------------------------------------------------------------------------------------------------


def begin_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    run: Run,
    to_cpu: ToCPU = on_cpu,
) -> Write:
    """Collect the checkpoint of a step. A collective.

    Args:
        folder: Parent of the checkpoints.
        model: Unwrapped model.
        optimizer: Optimizer to save.
        state: Result of `Trainer.state_dict`.
        keep: Checkpoints to keep, in addition to the best one.
        run: Run with settings, data and storage.
        to_cpu: Function that copies tensors, if training continues during the write.

    Returns:
        A collective that writes the checkpoint, deletes older ones and returns its path. If a rank cannot write, it
        warns, keeps older checkpoints and returns None.
    """
    step, best = state["step"], best_step(state)
    final = folder / f"step-{step:08d}"
    if run.on_main_and_share(lambda: final.exists() and manifest.find_damage(final) is None):
        return lambda _: final
    try:
        together(lambda: manifest.sweep(folder) if run.owns_folder else None)
        free = partial(drop_older, folder, step, best, run.print)
        write_files = begin_save(
            final,
            model,
            optimizer,
            {"training": state, "config": _trajectory(run), "random": None},
            step=step,
            make_free=free,
            to_cpu=to_cpu,
            ranks=run.ranks_here,
        )
    except OSError as error:
        _warn(run, step, error)
        return lambda _: None

    def write(group: dist.ProcessGroup | None) -> Path | None:
        try:
            names = write_files(group)
        except OSError as error:
            _warn(run, step, error)
            return None
        if run.owns_folder:
            prune(folder, step, keep, best, run.print)
        if run.storage is not None:
            put_checkpoint(final, names, keep, best, run, group)
        return final

    return write


def _warn(run: Run, step: int, error: OSError) -> None:
    run.print(f"warning: no checkpoint at step {step}: {error}; older checkpoints are untouched, training goes on.")


# --- loading -----------------------------------------------------------------------------------------------------


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Run,
) -> dict[str, Any]:
    """Load the verified checkpoint at `path` into `model` and `optimizer`. A collective.

    With the same world size and slots, the saved placement is restored before tensors are read, so no expert migrates.
    With a different world size or slots, experts keep their current placement.

    Returns:
        The saved `state`.

    Raises:
        UserError: On every rank, before any change, if format, configuration, data or model differ.
    """
    saved = read(path)
    free = LENGTH if run.config.extend else frozenset()
    load_tensors(saved, model, optimizer, _differences(saved.state["config"], _trajectory(run), free))
    training: dict[str, Any] = saved.state["training"]
    return training


def _differences(then: dict[str, Any], now: dict[str, Any], free: Set[str]) -> list[str]:
    """Describe settings and data that differ, except `free` settings."""
    lines = [
        f"it was made with {field} {then.get(field)} and this run has {now.get(field)}"
        for field in sorted((then | now).keys() - {DATA} - free)
        if then.get(field) != now.get(field)
    ]
    line = other_data(then.get(DATA, {}), now.get(DATA, {}))
    return lines if line is None else [*lines, f"it was made with {line}"]


def _trajectory(run: Run) -> dict[str, Any]:
    """Return settings and data that affect training results."""
    settings = to_dict(run.config).items()
    return {name: value for name, value in settings if decides_what_is_learned(name)} | {DATA: run.data}
