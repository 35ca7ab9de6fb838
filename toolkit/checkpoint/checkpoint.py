"""A run's checkpoints: when one may be loaded into a run, and what is deleted for a new one.

The files are those of `toolkit.experts.state.checkpoint_files`, in `checkpoints/step-00000100/` of the run's folder;
their state.json has step, metric sums, callbacks, results, the configuration and the identity of the data.
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
from toolkit.experts.state.checkpoint_files import begin_save, load_verified
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
    """Collect the checkpoint of step `state["step"]`, and return what writes it under `folder` and deletes all but the
    newest `keep` and the best one, where the state names one. Both are collectives.

    `model` is not wrapped. Writing returns the new folder; or None, after one line of warning, where it could not be
    written on some rank: then everything older is as it was. Where `to_cpu` copies each tensor
    (`toolkit.checkpoint.background.HostBuffers`), training may go on before it is written.
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
            state=state,
            config=_trajectory(run),
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
    """Load the checkpoint at `path`, which verifies, into `model` and `optimizer`; returns the `state` saved with it.

    A collective. On as many ranks with as many slots experts are placed where they were saved, before tensors are read,
    so that nothing migrates; elsewhere they stay where they are. Raises UserError on every rank, before anything is
    changed, where the checkpoint is of another format, configuration or model.
    """
    remedy = "use the settings it was made with, or another run_dir"
    free = LENGTH if run.config.extend else frozenset()
    now = _trajectory(run)

    def differences(saved: dict[str, Any]) -> list[str]:
        return _differences(saved["config"], now, free)

    saved = load_verified(path, model, optimizer, remedy=remedy, differences=differences)
    training: dict[str, Any] = saved["training"]
    return training


def _differences(then: dict[str, Any], now: dict[str, Any], free: Set[str]) -> list[str]:
    """Settings and data that differ and are not `free` to, each as half a sentence."""
    lines = [
        f"it was made with {field} {then.get(field)} and this run has {now.get(field)}"
        for field in sorted((then | now).keys() - {DATA} - free)
        if then.get(field) != now.get(field)
    ]
    line = other_data(then.get(DATA, {}), now.get(DATA, {}))
    return lines if line is None else [*lines, f"it was made with {line}"]


def _trajectory(run: Run) -> dict[str, Any]:
    """The settings and data that training results depend on."""
    settings = to_dict(run.config).items()
    return {name: value for name, value in settings if decides_what_is_learned(name)} | {DATA: run.data}
