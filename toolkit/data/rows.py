"""Rows of a user's data set in a file, a folder or on the Hub, read with `datasets`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

from toolkit.compat import fingerprint
from toolkit.data.cache import cache_dir
from toolkit.data.files import all_parts, content_key
from toolkit.data.hub import why_out_of_reach
from toolkit.errors import UserError, one_line
from toolkit.integrations.accelerate.patches import Patches
from toolkit.progress_bar import bar_options

FORMATS = {".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffixes of supported files, and the names of their formats in `datasets`."""
HELD_OUT = 0.1
"""Fraction of rows to hold out of a data set without a test split."""


def is_own(dataset: str) -> bool:
    """Return whether `dataset` is a file, a folder or "owner/name" on the Hub, not the name of a built-in data set."""
    return "/" in dataset or Path(dataset).expanduser().exists()


def folders_of(dataset: str) -> tuple[Path, ...]:
    """Return the folders that may have the files which a data set's rows name: its own, or the Hub's caches."""
    import datasets
    from huggingface_hub import constants

    here = Path(dataset).expanduser()
    if here.exists():
        return (here if here.is_dir() else here.parent,)
    return Path(constants.HF_HUB_CACHE), Path(datasets.config.HF_DATASETS_CACHE)


def load_splits(dataset: str, config: str | None = None) -> tuple[Any, str]:
    """Load a data set.

    Args:
        dataset: A file, a folder, or "owner/name" on the Hub.
        config: Configuration of a Hub data set that has several.

    Returns:
        A `datasets.DatasetDict`, and a key that changes with its content.

    Raises:
        UserError: The data set is missing, incomplete, or not readable by `datasets`.
    """
    import datasets
    from huggingface_hub import constants

    here = Path(dataset).expanduser()
    if not here.exists() and (dataset.startswith((".", "/", "~")) or dataset.count("/") > 1):
        raise UserError(f"dataset={dataset!r}: no such file or folder. Check the path.")
    if not (here.exists() or constants.HF_HUB_OFFLINE) and (unreachable := why_out_of_reach()):
        raise UserError(f"dataset={dataset!r}: {unreachable}. HF_HUB_OFFLINE=1 uses the local cache.")
    key = ""
    what: dict[str, Any] = {"path": dataset, "name": config}
    if here.exists():  # `datasets` identifies local files by path and time only
        files = all_parts([here] if here.is_file() else (path for path in here.rglob("*") if path.is_file()))
        key = content_key(files)
        what |= {"path": str(here), "cache_dir": str(cache_dir() / "datasets" / key)}
        if here.is_file():
            if here.suffix not in FORMATS:
                raise UserError(
                    f"dataset={dataset!r}: has another format. Give a folder, or a file of {', '.join(FORMATS)}."
                )
            what |= {"path": FORMATS[here.suffix], "data_files": str(here)}
    with _quiet_datasets() as errors:
        try:
            splits = datasets.load_dataset(**what)
        # `datasets`, the Hub's client and Apache Arrow raise their own types for missing or invalid files.
        except Exception as error:
            why = one_line(Exception(errors[-1]) if errors else error.__cause__ or error)
            remedy = "Check its name, its files and the network."
            raise UserError(f"dataset={dataset!r}: cannot be loaded ({why}). {remedy}") from error
    key += "".join(fingerprint(rows) for rows in splits.values())
    return splits, hashlib.sha256(key.encode()).hexdigest()[:16]


@contextmanager
def _quiet_datasets() -> Iterator[list[str]]:
    """Hide logged errors of `datasets`, and draw its progress bars as `progress` does. Yield the errors, because only
    they name a damaged file."""
    from datasets.utils import tqdm

    errors: list[str] = []

    def is_shown(record: logging.LogRecord) -> bool:
        if is_error := record.levelno >= logging.ERROR:
            errors.append(record.getMessage())
        return not is_error

    handlers = list(logging.getLogger("datasets").handlers)
    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        with Patches() as patches:
            patches.replace(tqdm, "__init__", partialmethod(tqdm.__init__, **bar_options()))
            yield errors
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)


def train_and_test(splits: Any) -> tuple[dict[str, Any], str | None]:
    """Return the rows of a `datasets.DatasetDict` by use, and a message if a test split was drawn.

    The rows of "test" are the split `test`, else `validation`, else a seeded tenth, stratified if there are classes.
    "validation" is the split `validation` of a data set that also has a split `test`.
    """
    import datasets

    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    held_out = [splits[part] for part in ("test", "validation") if part in splits and splits[part] is not train]
    if held_out:
        return dict(zip(("train", "test", "validation"), (train, *held_out), strict=False)), None
    classes = next((name for name, kind in train.features.items() if isinstance(kind, datasets.ClassLabel)), None)
    try:
        parts = train.train_test_split(HELD_OUT, seed=0, stratify_by_column=classes)
    except ValueError:  # a class has too few rows for both parts
        parts = train.train_test_split(HELD_OUT, seed=0)
    said = f"it has no test split: {len(parts['test']):,} of {len(train):,} rows, drawn with seed 0, are held out."
    return dict(parts), said


def find_column(dataset: str, rows: Any, argument: str, names: tuple[str, ...], kinds: tuple[Any, ...] = ()) -> str:
    """Find the column of `rows` with one of `names`, else the only column whose feature type or dtype is in `kinds`.

    Raises:
        UserError: No column matches, or several do. The message names the use of the column, `argument`.
    """
    for name in names:
        if name in rows.column_names:
            return name
    found = [name for name, kind in rows.features.items() if {type(kind), getattr(kind, "dtype", None)} & {*kinds}]
    if len(found) != 1:
        raise UserError(
            f"dataset={dataset!r}: has no column for the {argument}, but {', '.join(rows.column_names)}. "
            f"Name one {' or '.join(names)}."
        )
    return found[0]
