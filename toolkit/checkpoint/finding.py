"""Search for the newest verified checkpoint of a run in its folder or its `storage`, and copies to `storage`.

With storage, each machine can have its own run folder: its checkpoints have the files of the ranks of this machine, and
the manifest of all files. The storage gets all files; a continued run downloads missing files.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from toolkit.checkpoint.retention import newest_first, step_of
from toolkit.experts.parallel.collectives import on_main, together
from toolkit.experts.state import manifest
from toolkit.run.storage import CHECKPOINTS, Storage

if TYPE_CHECKING:
    from toolkit.run.run import Run


def find_checkpoint(folder: Path, run: Run) -> Path | None:
    """Return the newest checkpoint in `folder` or the run's storage that is complete on every machine, or None.

    A collective. Machines download missing files. Warns about checkpoints that fail verification.
    """
    known = {path.name for path in on_main(lambda: newest_first(folder))}
    if (storage := run.storage) is not None:
        try:
            known |= {*on_main(lambda: _copies(storage))}
        except OSError as error:
            run.print(f"warning: {storage.uri} cannot be read ({error}): only checkpoints in {folder} are used.")
    for path in sorted((folder / name for name in known), key=step_of, reverse=True):
        if (damage := fetch_checkpoint(path, run)) is None:
            return path
        run.print(f"warning: checkpoint {path.name} is passed over: {damage}.")
    return None


def fetch_checkpoint(path: Path, run: Run) -> str | None:
    """Complete the checkpoint `path` on every machine from the storage, if any; return the remaining damage or None.

    A collective."""
    return next(filter(None, together(partial(_fetch, path, run))), None)


def _fetch(path: Path, run: Run) -> str | None:
    if not run.owns_folder:
        return None
    damage = manifest.find_damage(path)
    if damage is not None and run.storage is not None:
        with suppress(OSError, ValueError):
            _complete(path, run.storage)
            damage = None
    if damage is None and (step := manifest.read_manifest(path)["step"]) != step_of(path):
        damage = f"its files are from step {step}"  # a renamed folder, which would pass as the wrong step
    return damage


def _complete(path: Path, storage: Storage) -> None:
    """Download the checkpoint to `path`, and keep undamaged files."""
    there = f"{CHECKPOINTS}/{path.name}"
    writing = path.with_name(manifest.WRITING + path.name)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    storage.get(f"{there}/{manifest.NAME}", writing / manifest.NAME)
    about = manifest.read_manifest(writing)
    for name, wanted in about["files"].items():
        own = path / name
        if own.is_file() and not own.is_symlink() and manifest.seal(own) == wanted:
            shutil.copy2(own, writing / name)
        else:
            storage.get(f"{there}/{name}", writing / name)
    manifest.publish(writing, path, about)


# --- copies -------------------------------------------------------------------------------------------------------


def put_checkpoint(
    folder: Path, files: list[str], keep: int, best: int | None, run: Run, group: dist.ProcessGroup | None
) -> None:
    """Copy `files` of this machine, then the manifest; delete all copies except the newest `keep` and the best.

    A collective of `group`, None for all ranks. If the storage fails, a warning is printed and training continues;
    older copies are unchanged.
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
    """Return the names of complete copies (with a manifest), newest first."""
    names = [name for name in storage.names(CHECKPOINTS, "directory") if re.fullmatch(r"step-\d{8,}", name)]
    complete = [name for name in names if manifest.NAME in storage.names(f"{CHECKPOINTS}/{name}")]
    return sorted(complete, key=lambda name: step_of(Path(name)), reverse=True)
