"""Rows of a data set of one's own: in a file, in a folder or on the Hub, as `datasets` reads them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.compat import fingerprint
from toolkit.data.cache import cache_dir
from toolkit.data.files import all_parts, content_key
from toolkit.data.hub import why_out_of_reach
from toolkit.errors import UserError, one_line

FORMATS = {".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffixes of the files that hold rows, and what `datasets` calls their format."""
HELD_OUT = 0.1
"""The fraction of rows that is held out where a data set does not say which."""


def is_own(dataset: str) -> bool:
    """Returns whether `dataset` is a file or folder, or "owner/name" of the Hub, and not the name of a known set."""
    return "/" in dataset or Path(dataset).expanduser().exists()


def load_splits(dataset: str, config: str | None = None) -> tuple[Any, str]:
    """Load a data set.

    Args:
        dataset: A file, a folder, or "owner/name" of the Hub.
        config: The configuration of a data set of the Hub that has several.

    Returns:
        A `datasets.DatasetDict`, and a key that changes with its content.

    Raises:
        UserError: It is not there, not whole, or not what `datasets` reads.
    """
    import datasets
    from huggingface_hub import constants

    here = Path(dataset).expanduser()
    if not (here.exists() or constants.HF_HUB_OFFLINE) and (unreachable := why_out_of_reach()):
        raise UserError(
            f"dataset={dataset!r}: {unreachable}; HF_HUB_OFFLINE=1 takes what was downloaded before, "
            "and dataset='stdlib' needs no network."
        )
    key = ""
    what: dict[str, Any] = {"path": dataset, "name": config}
    if here.exists():  # `datasets` tells local files by path and time alone
        files = all_parts([here] if here.is_file() else (path for path in here.rglob("*") if path.is_file()))
        key = content_key(files)
        what |= {"path": str(here), "cache_dir": str(cache_dir() / "datasets" / key)}
        if here.is_file():
            if here.suffix not in FORMATS:
                raise UserError(f"dataset={dataset!r}: give a folder, or a file of {', '.join(FORMATS)}.")
            what |= {"path": FORMATS[here.suffix], "data_files": str(here)}
    with _quiet_datasets() as errors:
        try:
            splits = datasets.load_dataset(**what)
        # It, the Hub's client and Apache Arrow raise their own kinds for what is not there, or is not right.
        except Exception as error:
            why = one_line(Exception(errors[-1]) if errors else error.__cause__ or error)
            remedy = "Check its name, its files and the network."
            raise UserError(f"dataset={dataset!r}: cannot be loaded ({why}). {remedy}") from error
    key += "".join(fingerprint(rows) for rows in splits.values())
    return splits, hashlib.sha256(key.encode()).hexdigest()[:16]


@contextmanager
def _quiet_datasets() -> Iterator[list[str]]:
    """Hide the progress bars and logged errors of `datasets`. Yields these errors: only they name a damaged file."""
    import datasets

    errors: list[str] = []

    def is_shown(record: logging.LogRecord) -> bool:
        if is_error := record.levelno >= logging.ERROR:
            errors.append(record.getMessage())
        return not is_error

    handlers, shows_progress = list(logging.getLogger("datasets").handlers), not datasets.are_progress_bars_disabled()
    for handler in handlers:
        handler.addFilter(is_shown)
    datasets.disable_progress_bars()
    try:
        yield errors
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)
        if shows_progress:
            datasets.enable_progress_bars()


def train_and_test(splits: Any) -> tuple[Any, Any, str | None]:
    """The training and test rows of a `datasets.DatasetDict`, and how they were split where it does not say.

    Held out is its split `test`, else `validation`, else a seeded tenth, of each class alike where there are classes.
    """
    import datasets

    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    for split in ("test", "validation"):
        if split in splits and splits[split] is not train:
            return train, splits[split], None
    classes = next((name for name, kind in train.features.items() if isinstance(kind, datasets.ClassLabel)), None)
    try:
        parts = train.train_test_split(HELD_OUT, seed=0, stratify_by_column=classes)
    except ValueError:  # a class has too few rows for both parts
        parts = train.train_test_split(HELD_OUT, seed=0)
    said = f"it has no test split: {len(parts['test']):,} of {len(train):,} rows, drawn with seed 0, are held out."
    return parts["train"], parts["test"], said


def find_column(dataset: str, rows: Any, argument: str, names: tuple[str, ...], kinds: tuple[type, ...] = ()) -> str:
    """The column of `rows` that has one of `names`, else the only one whose type is one of `kinds`.

    Raises UserError, which says what the column is for (`argument`), where there is none or there are several.
    """
    for name in names:
        if name in rows.column_names:
            return name
    found = [name for name, kind in rows.features.items() if kinds and isinstance(kind, kinds)]
    if len(found) != 1:
        raise UserError(
            f"dataset={dataset!r}: no column of {', '.join(rows.column_names)} is the {argument}: "
            f"call it {' or '.join(names)}."
        )
    return found[0]
