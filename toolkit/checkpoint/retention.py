"""Checkpoints of a run: listing, the best one, and deletion by number or because the disk is full."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, reading
from toolkit.experts.state import manifest


def step_of(path: Path) -> int:
    """Return the step of the checkpoint `path`."""
    return int(path.name.removeprefix("step-"))


def newest_first(folder: Path) -> list[Path]:
    """List checkpoints in `folder`, including damaged ones."""
    return sorted((p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)), key=step_of, reverse=True)


def best_step(training: Mapping[str, Any]) -> int | None:
    """Return the step of the best checkpoint from `training` of state.json; None if no best one is kept."""
    best = training.get("callbacks", {}).get("Checkpointing", {}).get("best")
    return int(best["step"]) if best else None


def best_or_newest(folder: Path) -> Path | None:
    """Return the best checkpoint in `folder` according to the newest undamaged state.json; else the newest.

    Raises UserError if the best checkpoint is missing.
    """
    found = newest_first(folder)
    readable = next((path for path in found if manifest.find_damage(path, {manifest.STATE}) is None), None)
    with reading(folder, "Name a checkpoint in it."):
        step = None if readable is None else best_step(manifest.read_state(readable)["training"])
    if step is None:
        return found[0] if found else None
    best = next((path for path in found if step_of(path) == step), None)
    if best is None:
        raise UserError(f"{folder}: the best checkpoint, of step {step:,}, is missing. Restore it, or name another.")
    return best


def find_folder(given: Path) -> Path:
    """Return `given` if it is a checkpoint, else the checkpoint in a folder of `Accelerator.save_state`, or the best or
    newest checkpoint of a run folder, unverified.

    Raises UserError if there is none.
    """
    named_as_one = re.fullmatch(r"step-\d{8,}", given.name) is not None
    if (given / manifest.NAME).exists() or (named_as_one and given.is_dir()):
        return given
    for parent in (given / "checkpoints", given):
        if found := best_or_newest(parent):
            return found
    models = sorted(path.parent for path in given.glob(f"experts_*/{manifest.NAME}"))
    if len(models) == 1:
        return models[0]
    several = f"holds {len(models)} models, {', '.join(path.name for path in models)}" if models else ""
    what = several or ("holds no checkpoint" if given.exists() else "does not exist")
    raise UserError(f"{given}: {what}. Give a folder step-<number>, the run folder above it, or one of save_state.")


def prune(folder: Path, step: int, keep: int, best: int | None, say: Callable[[str], None]) -> None:
    """Delete checkpoints up to `step`, except the best and the newest `keep`. Later ones failed verification."""
    try:
        for path in [path for path in newest_first(folder) if step_of(path) <= step][keep:]:
            if step_of(path) != best:
                manifest.remove(path)
    except OSError as error:
        say(f"warning: an old checkpoint could not be deleted ({error}); training goes on.")


def to_go_back_to(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of `step`; None if the run already went back to `step`.

    Raises UserError if it is missing or damaged.
    """
    if _aside(folder, step).exists():
        return None
    path = folder / f"step-{step:08d}"
    if damage := manifest.find_damage(path):
        steps = ", ".join(str(step_of(known)) for known in reversed(newest_first(folder))) or "none"
        remedy = f"there is no such checkpoint in {folder} ({damage}): take one of {steps}"
        raise UserError(field="resume_from", value=step, remedy=remedy)
    return path


def go_back(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Move the checkpoints after `step` aside so that a run continues from `step`; only once for each `step`.

    The folder `after-step-...`, possibly empty, also marks this as done: afterwards the same command continues the run.
    """
    aside = _aside(folder, step)
    if aside.exists():
        return
    moving = folder / f".{aside.name}"
    moving.mkdir(exist_ok=True)
    later = [path for path in newest_first(folder) if step_of(path) > step]
    for path in later:
        path.rename(moving / path.name)
    moving.rename(aside)
    if later:
        say(f"going back to step {step:,}: {len(later)} later checkpoint(s) are kept in {aside}.")


def _aside(folder: Path, step: int) -> Path:
    return folder / f"after-step-{step:08d}"


def drop_older(folder: Path, step: int, best: int | None, say: Callable[[str], None], missing: int) -> None:
    """Delete the oldest checkpoints before `step` until `missing` bytes are freed, except the best and the newest
    verified one. Deletes none if that would not free enough."""
    verified = [p for p in newest_first(folder) if step_of(p) < step and manifest.find_damage(p) is None]
    spare = [path for path in verified[1:] if step_of(path) != best]
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in spare}
    while sizes and sum(sizes.values()) >= missing > 0:
        path, size = sizes.popitem()
        manifest.remove(path)
        missing -= size
        say(f"warning: the disk is full: {path.name} was deleted to make room for step {step}.")
