"""Which checkpoint of a run is the newest that verifies, in its folder or in its `storage`.

With a storage a run's folder may be another one on each machine: that of a checkpoint holds the files of the ranks of
its machine, and the manifest of all. The storage gets all of them; a run that continues takes from it what its machine
lacks.
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch.distributed as dist
from pydantic import BaseModel, Field, NonNegativeInt, Strict

from toolkit.checkpoint.retention import best_step, newest_first, step_of
from toolkit.errors import one_line
from toolkit.experts.parallel.collectives import on_main, together
from toolkit.experts.state import manifest
from toolkit.experts.state.checkpoint_files import STATE, check_types, read_about, read_state
from toolkit.run.storage import CHECKPOINTS, Storage

if TYPE_CHECKING:
    from toolkit.run.run import Run


def find_checkpoint(folder: Path, run: Run) -> Path | None:
    """The newest checkpoint under `folder`, or in the run's storage, that is whole on every machine, or None.

    A collective. Machines take from the storage what they lack. Warns of checkpoints that do not verify.
    """
    for name in _known(folder, run):
        path = folder / name
        if (damage := fetch_checkpoint(path, run)) is None:
            return path
        run.print(f"warning: checkpoint {name} is passed over: {damage}.")
    return None


def fetch_checkpoint(path: Path, run: Run) -> str | None:
    """Have the checkpoint `path` whole on every machine, from the storage where one lacks it; returns what is wrong
    with it then, or None. A collective."""
    damage = next((line for line in together(partial(_fetch, path, run)) if line is not None), None)
    return damage or on_main(partial(_strangeness, path))


def _known(folder: Path, run: Run) -> list[str]:
    """Names of checkpoints on the main process's machine or in the storage, newest first. A collective."""
    copies: list[str] = []
    if (storage := run.storage) is not None:
        try:
            copies = on_main(lambda: _copies(storage))
        except OSError as error:
            run.print(f"warning: {storage.uri} cannot be read ({error}): only {folder} is looked into.")
    own = on_main(lambda: [path.name for path in newest_first(folder)])
    return sorted({*own, *copies}, key=lambda name: step_of(Path(name)), reverse=True)


def _fetch(path: Path, run: Run) -> str | None:
    """Have the checkpoint `path` whole on this machine; returns what is wrong with it then, or None."""
    damage = manifest.find_damage(path) if run.owns_folder else None
    if damage is None or run.storage is None:
        return damage
    try:
        _complete(path, run.storage)
    except (OSError, ValueError, KeyError):
        return damage
    return manifest.find_damage(path)


def _complete(path: Path, storage: Storage) -> None:
    """Write the checkpoint of the storage as `path`, keeping files that are there and as they should be."""
    there = f"{CHECKPOINTS}/{path.name}"
    writing = path.with_name(manifest.WRITING + path.name)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    (writing / manifest.NAME).write_bytes(storage.read(f"{there}/{manifest.NAME}"))
    about = manifest.read_manifest(writing)
    for name, wanted in about["files"].items():
        own = path / name
        if own.is_file() and not own.is_symlink() and manifest.seal(own) == wanted:
            shutil.copy2(own, writing / name)
        else:
            storage.get(f"{there}/{name}", writing / name)
    manifest.publish(writing, path, about)


class _Seal(BaseModel, strict=True):
    bytes: NonNegativeInt
    sha256: str


_Sum = Annotated[tuple[Any, str, float], Strict(False)]


class _Training(BaseModel, strict=True):
    """The types of what `Trainer.state_dict` gives; callbacks compare those of their own states."""

    step: NonNegativeInt
    samples: NonNegativeInt
    metric_sums: Annotated[list[dict[str, _Sum]], Field(min_length=1)]
    recorded: dict[str, Any]
    results: dict[str, Any]
    callbacks: dict[str, dict[str, Any]]
    metrics: _Seal | None = None


def _strangeness(path: Path) -> str | None:
    """Why undamaged files in `path` are not those of its step, or None. Raises UserError for another format."""
    if STATE not in (about := read_about(path))["files"]:
        return f"{STATE} is not in its manifest"
    try:
        training = read_state(path)["training"]
        check_types(_Training, training, "training")
        best_step(training)
    except (OSError, ValueError) as error:
        return one_line(error)
    if about["step"] != step_of(path):
        return f"its files are those of step {about['step']}"
    return None if training["step"] == about["step"] else f"{STATE} is that of step {training['step']}"


# --- copies -------------------------------------------------------------------------------------------------------


def put_checkpoint(
    folder: Path, files: list[str], keep: int, best: int | None, run: Run, group: dist.ProcessGroup | None
) -> None:
    """Copy `files` of this machine, and the manifest after all others; delete all copies but the newest `keep` and that
    of the step `best`.

    A collective of `group`, None for all ranks. Where the storage does not answer a line says so, training goes
    on, and older copies are as they were.
    """
    storage = run.storage
    assert storage is not None
    there = f"{CHECKPOINTS}/{folder.name}"

    def put_files() -> None:
        for name in files if run.owns_folder else ():
            storage.put(folder / name, f"{there}/{name}")

    def publish() -> None:
        storage.put_run(run.folder)
        storage.put(folder / manifest.NAME, f"{there}/{manifest.NAME}")
        for old in _copies(storage)[keep:]:
            if step_of(Path(old)) != best:
                storage.remove(f"{CHECKPOINTS}/{old}", first=manifest.NAME)

    try:
        together(put_files, group)
        on_main(publish, group)
    except OSError as error:
        run.print(f"warning: {folder.name} is not in {storage.uri} ({error}); training goes on.")


def _copies(storage: Storage) -> list[str]:
    """The names of copies that have a manifest, and so are complete; newest first."""
    names = [name for name in storage.names(CHECKPOINTS, "directory") if re.fullmatch(r"step-\d{8,}", name)]
    whole = [name for name in names if manifest.NAME in storage.names(f"{CHECKPOINTS}/{name}")]
    return sorted(whole, key=lambda name: step_of(Path(name)), reverse=True)
