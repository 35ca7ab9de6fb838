"""The run folder: choice, lock, continuation and files.

config.json     the configuration, the recipe's name and the identity of the data; marks the folder of a run
metrics.jsonl   one line per log step
checkpoints/    see toolkit.checkpoint.checkpoint
results.json    final numbers
summary.txt     final numbers as text, next to plots (*.png)
.finishing      from before results.json until the plots are drawn, and while a finished run is extended
hang/           stack traces of each process after a hang, see toolkit.train.callbacks.watchdog
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

from toolkit.errors import UserError, reading, require, require_type
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
    """Return whether the run in `folder` has its results, summary and plots."""
    return (folder / "results.json").exists() and not (folder / FINISHING).exists()


def results_of(folder: str | Path) -> dict[str, Any] | None:
    """Return the final numbers of the run in `folder`, or None if unfinished. Raises UserError if they are damaged."""
    remedy = "Delete it, and run the same command again to write it again"
    return read_json(Path(folder) / "results.json", remedy) if is_finished(Path(folder)) else None


def open_folder(
    name: str, config: RunConfig, say: Callable[[str], None], storage: Storage | None = None
) -> tuple[Path, FileLock, dict[str, Any] | None]:
    """Open and lock the folder for `config`. Call on the main process only.

    Returns the folder, its lock and the config.json of the run inside, if any; {} if config.json is damaged. Files that
    are missing, damaged or older than in `storage` are downloaded first. A damaged config.json cannot be compared with
    `config`: `say` gets a warning. Raises UserError for a folder that another job uses, that holds a finished run or a
    run with other settings, that has nothing to resume, or that cannot be written.
    """
    folder = folder_to_continue() or config.run_dir
    if config.resume == "yes":
        if folder is None:
            configs = sorted((RUNS / name).glob("*/config.json"), key=lambda path: path.stat().st_mtime_ns)
            folder = configs[-1].parent if configs else None
        is_there = folder is not None and (folder / "config.json").exists()
        if not is_there and storage is None:
            raise UserError(f"resume='yes': no run in {folder or RUNS / name}. Leave it out to begin one.")
    may_begin = folder is None or storage is not None or _is_ours(folder)
    require(may_begin, "run_dir", folder, "it holds other files and no run: give a new folder, or an empty one")
    try:
        folder = _create_new(RUNS / name) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"run_dir={folder}: another job uses this folder. Wait, or choose another.") from None
    try:
        if storage is not None:
            _fetch(folder, config, storage)
        for appended in folder.glob("*.jsonl"):
            if appended.is_symlink():
                raise UserError(f"{appended}: is a link, and the run would write to its target. Remove it.")
        return folder, lock, _run_to_continue(folder, name, config, say)
    except BaseException:
        lock.release()
        raise


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that failed before it began, unless it holds other files."""
    with suppress(OSError):
        files = {path.name: path for path in folder.iterdir()}
        if files.keys() <= {"config.json", "metrics.jsonl", LOCK} and not files["metrics.jsonl"].stat().st_size:
            for path in files.values():
                path.unlink()
            folder.rmdir()


def _is_ours(folder: Path) -> bool:
    """Return whether `folder` can be used: it holds a run, remains of a run, or only hidden files."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if all(name.startswith(".") for name in names):
        return True
    with suppress(OSError, ValueError):
        if "recipe" in from_json((folder / "config.json").read_text(encoding="utf-8")):
            return True
    return (folder / LOCK).exists() or any((folder / "checkpoints").glob(f"step-*/{manifest.NAME}"))


def _fetch(folder: Path, config: RunConfig, storage: Storage) -> None:
    """Copy the run from `storage` into `folder`. Raises UserError if `config.resume` does not allow it."""
    holds_run = "config.json" in storage.names()
    if holds_run and config.resume == "no" and not past_restarts():
        raise UserError(f"storage={storage.uri}: has a run, and resume='no' was given. Choose another.")
    storage.get_run(folder)
    if config.resume == "yes" and not (folder / "config.json").exists():
        raise UserError(f"resume='yes': no run in {storage.uri}. Leave it out to begin one.")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in the file. Raises UserError with `remedy` if there is none or reading fails."""
    with reading(path, f"{remedy}."):
        values = from_json(path.read_text(encoding="utf-8"))
        require_type(str(path), values, dict, remedy)
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as JSON, atomically: see `write_text`."""
    write_text(path, to_json(values, indent=2) + "\n")


def write_text(path: Path, text: str, *, partial: str | None = None, durable: bool = True) -> None:
    """Write `text` to `path` atomically: a kill leaves the old file or the new one.

    The temporary file is `partial`, next to `path`; concurrent writers need different names. Without `durable` (fsync),
    a machine crash can lose both the old text and the new one.
    Symbolic links at `path` or at the temporary file are replaced, not followed. Bytes of file names that are not UTF-8
    are written as escapes that JSON decodes.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"), partial=partial, durable=durable)


def write_bytes(path: Path, content: bytes, *, partial: str | None = None, durable: bool = True) -> None:
    """Write `content` to `path` atomically: see `write_text`."""
    unfinished = path.with_name(partial or f".{path.name}.partial")
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:  # errors of a full disk have no file name
        if error.strerror and error.filename is None:
            error.filename = str(path)
        raise
    unfinished.replace(path)


def recorded_config(name: str, config: RunConfig) -> dict[str, Any]:
    """Return the content of config.json: the recipe name and every field, with the names of the run in W&B."""
    return {"recipe": name, **to_dict(config), **config.names}


def _create_new(parent: Path) -> Path:
    """Create a folder named by the time, with a number for further runs in the same second."""
    stamp, number = time.strftime("%Y%m%d-%H%M%S"), 1
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def _run_to_continue(folder: Path, name: str, config: RunConfig, say: Callable[[str], None]) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.exists():
        if config.extend:
            raise UserError(f"extend=True: no run in {folder}. Leave it out to begin one.")
        return None
    if config.resume == "no" and not past_restarts():
        raise UserError(f"run_dir={folder}: has a run, and resume='no' was given. Choose another folder.")
    if is_finished(folder) and not config.extend:
        raise UserError(f"run_dir={folder}: has a finished run. Choose another folder, or continue with extend=True.")
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
        raise UserError(f"run_dir={folder}: has a run of the recipe {before.get('recipe')}. Choose another folder.")
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
    """Return whether the run in `folder` made a step; without a step, it can start again with other settings."""
    metrics = folder / "metrics.jsonl"
    return any(folder.glob("checkpoints/step-*")) or (metrics.exists() and metrics.stat().st_size > 0)


def _trajectory(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.json that training results depend on, by dotted name."""
    return {field: value for field, value in leaves(config) if decides_what_is_learned(field)}
