"""Which checkpoints of a run there are, which is the best, and which are deleted: by number, or because the disk is
full."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt, model_validator

from toolkit.errors import UserError
from toolkit.experts.state import manifest
from toolkit.experts.state.checkpoint_files import check_types, read_state


class _Best(BaseModel, strict=True):
    metric: str
    step: NonNegativeInt
    evaluated: dict[str, Any]

    @model_validator(mode="after")
    def _has_its_metric(self) -> _Best:
        if not isinstance(self.evaluated.get(self.metric), int | float):
            raise ValueError(f"evaluated has no number for {self.metric}")
        return self


class _Checkpointing(BaseModel, strict=True):
    best: _Best | None = None


class _Callbacks(BaseModel, strict=True):
    Checkpointing: _Checkpointing | None = None


class _Training(BaseModel, strict=True):
    """The types of what says which checkpoint is the best."""

    callbacks: _Callbacks


def step_of(path: Path) -> int:
    """The step that the checkpoint `path` is of."""
    return int(path.name.removeprefix("step-"))


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, damaged ones too."""
    return sorted((p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)), key=step_of, reverse=True)


def best_step(training: Mapping[str, Any]) -> int | None:
    """The step of the best checkpoint, as the state of a run has it; None where none is kept. Raises ValueError where
    it has other types."""
    check_types(_Training, training, "training")
    best = training["callbacks"].get("Checkpointing", {}).get("best")
    return best["step"] if best else None


def best_or_newest(folder: Path) -> Path | None:
    """The best checkpoint in `folder`, as the newest state says that can be read; the newest one where none is kept.

    Raises UserError where the best one is not there.
    """
    found = newest_first(folder)
    step = None
    for path in found:
        with suppress(OSError, ValueError, LookupError):
            step = best_step(read_state(path)["training"])
            break
    if step is None:
        return found[0] if found else None
    best = next((path for path in found if step_of(path) == step), None)
    if best is None:
        raise UserError(f"{folder}: the best checkpoint, of step {step:,}, is not there: put it back, or name another.")
    return best


def prune(folder: Path, step: int, keep: int, best: int | None, say: Callable[[str], None]) -> None:
    """Delete all but the best one and the newest `keep` up to `step`, which verifies. Later ones did not verify, or do
    not exist."""
    try:
        for path in [path for path in newest_first(folder) if step_of(path) <= step][keep:]:
            if step_of(path) != best:
                manifest.remove(path)
    except OSError as error:
        say(f"warning: an old checkpoint could not be deleted ({error}); training goes on.")


def to_go_back_to(folder: Path, step: int) -> Path | None:
    """The checkpoint of `step`; None where the run went back to it before, and continues from then on.

    Raises UserError where there is no such checkpoint, or it is damaged.
    """
    if _aside(folder, step).exists():
        return None
    known = {step_of(path): path for path in newest_first(folder)}
    if step not in known:
        steps = ", ".join(str(known_step) for known_step in sorted(known)) or "none"
        raise UserError(
            field="resume_from",
            value=step,
            remedy=f"there is no such checkpoint in {folder}: take one of {steps}",
        )
    if damage := manifest.find_damage(known[step]):
        raise UserError(field="resume_from", value=step, remedy=f"{damage}: take another")
    return known[step]


def go_back(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Put the checkpoints after `step` aside, so that a run continues from it; only once for each `step`.

    They go to `after-step-...`, and that folder, empty perhaps, is also the mark that it was done: the same command
    continues the run from then on.
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
    """Delete the oldest checkpoints before `step` until `missing` bytes are freed, but keep the best one and the newest
    that verifies.

    Deletes none where that does not free enough.
    """
    verified = [p for p in newest_first(folder) if step_of(p) < step and manifest.find_damage(p) is None]
    spare = [path for path in verified[1:] if step_of(path) != best]
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in spare}
    while sizes and sum(sizes.values()) >= missing > 0:
        path, size = sizes.popitem()
        manifest.remove(path)
        missing -= size
        say(f"warning: the disk is full: {path.name} was deleted to make room for step {step}.")
