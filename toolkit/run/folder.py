"""The folder of a run: how it is chosen, locked and continued, and what lies in it.

config.json     the configuration, the recipe's name and the identity of the data; a folder with this file holds a run
metrics.jsonl   one line per logged step
checkpoints/    see toolkit.checkpoint.checkpoint
results.json    final numbers
summary.txt     the same in words, and *.png
.finishing      from before results.json until the pictures are drawn, and while a finished run is extended
hang/           what each process of a run that hung did, see toolkit.train.callbacks.watchdog
profile/        traces of --profile
micro_batch_size.json   after a step ran out of memory, see toolkit.run.micro_batches
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from toolkit.errors import UserError, one_line
from toolkit.experts.state import manifest
from toolkit.run.config.run import RunConfig, to_dict
from toolkit.run.config.settings import LENGTH, decides_what_is_learned, leaves
from toolkit.run.launch.restarts import folder_to_continue, past_restarts
from toolkit.run.storage import Storage
from toolkit.run.tracking.jsonl import from_json, to_json

RUNS = Path("runs")
FINISHING = ".finishing"
LOCK = ".lock"
DATA = "data_identity"
"""The key of config.json that `toolkit.run.data` fills in."""


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has its results, summary and pictures."""
    return (folder / "results.json").exists() and not (folder / FINISHING).exists()


def results_of(folder: Path) -> dict[str, Any] | None:
    """The final numbers of the run in `folder`, or None while it is not finished. Raises UserError for damage."""
    remedy = "delete it, and run the same command again to have it written anew"
    return read_json(folder / "results.json", remedy) if is_finished(folder) else None


def open_folder(
    name: str, config: RunConfig, say: Callable[[str], None], storage: Storage | None = None
) -> tuple[Path, FileLock, dict[str, Any] | None]:
    """The folder that `config` asks for, locked, and the config.json of the run that it holds, if any; {} where that is
    damaged. Call on the main process only.

    What the `storage` has of the run is copied into the folder first, where its checkpoints are as new.

    `say` is told where config.json is damaged and cannot show whether the settings are the same as before.
    Raises UserError for a folder that another job uses, that holds a finished run or one of other settings, that has
    nothing to resume, or that cannot be written.
    """
    folder = folder_to_continue() or config.run_dir
    if config.resume == "yes":
        folder = folder or _newest(name)
        is_there = folder is not None and (folder / "config.json").exists()
        if not is_there and storage is None:
            raise UserError(f"resume='yes': no run in {folder or RUNS / name}: leave it out to begin one.")
    if folder is not None and storage is None and not _is_ours(folder):
        remedy = "it holds other files and no run: give a new folder, or an empty one"
        raise UserError(field="run_dir", value=folder, remedy=remedy)
    try:
        folder = _create_new(RUNS / name) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"run_dir={folder}: another job uses this folder: wait, or choose another.") from None
    try:
        if storage is not None:
            _fetch(folder, config, storage)
        for appended in folder.glob("*.jsonl"):
            if appended.is_symlink():
                raise UserError(f"{appended}: is a link, and the run would write to its target: remove it.")
        return folder, lock, _run_to_continue(folder, name, config, say)
    except BaseException:
        lock.release()
        raise


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that failed before it began, unless there are other files in it."""
    with suppress(OSError):
        files = {path.name: path for path in folder.iterdir()}
        if files.keys() <= {"config.json", "metrics.jsonl", LOCK} and not files["metrics.jsonl"].stat().st_size:
            for path in files.values():
                path.unlink()
            folder.rmdir()


def _is_ours(folder: Path) -> bool:
    """Whether `folder` may be taken: it holds a run, or what is left of one, or nothing but hidden files."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if all(name.startswith(".") for name in names):
        return True
    with suppress(OSError, ValueError):
        if "recipe" in from_json((folder / "config.json").read_text(encoding="utf-8")):
            return True
    return (folder / LOCK).exists() or any((folder / "checkpoints").glob(f"step-*/{manifest.NAME}"))


def _fetch(folder: Path, config: RunConfig, storage: Storage) -> None:
    """Copy what `storage` has of the run into `folder`. Raises UserError where `config.resume` does not allow that."""
    holds_run = "config.json" in storage.names()
    if holds_run and config.resume == "no" and not past_restarts():
        raise UserError(f"storage={storage.uri}: holds a run, and resume='no' was given: choose another.")
    storage.get_run(folder)
    if config.resume == "yes" and not (folder / "config.json").exists():
        raise UserError(f"resume='yes': no run in {storage.uri}: leave it out to begin one.")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in the file. Raises UserError with `remedy` where it holds something else, or cannot be read."""
    try:
        values = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}): {remedy}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {type(values).__name__} instead of an object: {remedy}.")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as JSON, atomically: see `write_text`."""
    write_text(path, to_json(values, indent=2) + "\n")


def write_text(path: Path, text: str, *, partial: str | None = None, durable: bool = True) -> None:
    """Replace `path` by `text` atomically: a kill leaves the old file or the new one.

    The unfinished file has the name `partial` beside `path`; processes that may write at once need one each. Of a file
    that is not `durable`, a machine that stops may leave neither the old text nor the new one.
    A link in the place of `path` or of the unfinished file is replaced, not followed. Bytes of a file's name that are
    no UTF-8 are written with escapes, which JSON reads as they were.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"), partial=partial, durable=durable)


def write_bytes(path: Path, content: bytes, *, partial: str | None = None, durable: bool = True) -> None:
    """Replace `path` by `content`, as `write_text` does."""
    unfinished = path.with_name(partial or f".{path.name}.partial")
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:  # of a full disk, which does not say which file
        if error.strerror and error.filename is None:
            error.filename = str(path)
        raise
    unfinished.replace(path)


def recorded_config(name: str, config: RunConfig) -> dict[str, Any]:
    """Return the content of config.json: the recipe's name and every field."""
    return {"recipe": name, **to_dict(config)}


def _create_new(parent: Path) -> Path:
    """A new folder named by the time, with a number for further runs in the same second."""
    stamp, number = time.strftime("%Y%m%d-%H%M%S"), 1
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def _newest(name: str) -> Path | None:
    """The folder of the latest run of this recipe."""
    configs = sorted((RUNS / name).glob("*/config.json"), key=lambda path: path.stat().st_mtime_ns)
    return configs[-1].parent if configs else None


def _run_to_continue(folder: Path, name: str, config: RunConfig, say: Callable[[str], None]) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.exists():
        if config.extend:
            raise UserError(f"extend=True: no run in {folder}: leave it out to begin one.")
        return None
    if config.resume == "no" and not past_restarts():
        raise UserError(f"run_dir={folder}: holds a run, and resume='no' was given: choose another folder.")
    if is_finished(folder) and not config.extend:
        raise UserError(f"run_dir={folder}: holds a finished run: choose another folder, or train on with extend=True.")
    try:
        before = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict):
        say(
            f"warning: {path} is damaged and is written again with the settings of this command; "
            "settings in a checkpoint still have to be equal."
        )
        return {}
    now = recorded_config(name, config)
    if before.get("recipe") != name:
        raise UserError(f"run_dir={folder}: holds a run of the recipe {before.get('recipe')}: choose another folder.")
    old = _trajectory(before)
    new = _trajectory(now)
    for field in old | new:
        if old.get(field) != new.get(field) and not (config.extend and field in LENGTH):
            if not _has_begun(folder):
                return None
            remedy = "give the same value to continue it, or another run_dir"
            started = f"the run in {folder} was started with {old.get(field)}"
            raise UserError(field=field, value=new.get(field), remedy=f"{started}: {remedy}")
    return before


def _has_begun(folder: Path) -> bool:
    """Whether the run in `folder` made a step; one that was refused before may begin anew with other settings."""
    metrics = folder / "metrics.jsonl"
    return any(folder.glob("checkpoints/step-*")) or (metrics.exists() and metrics.stat().st_size > 0)


def _trajectory(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json that training results depend on, by dotted name."""
    return {field: value for field, value in leaves(config) if decides_what_is_learned(field)}
