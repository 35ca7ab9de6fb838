"""Columns of Parquet files, read by `datasets` without leaving anything in its cache."""

from __future__ import annotations

import glob
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.data.files import check_digest, damaged
from toolkit.errors import UserError, one_line

ROWS_PER_READ = 4096


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns `names` of one file; images and audio stay encoded, as dicts with their `bytes`.

    Raises UserError where the package is missing, the file is damaged or without rows, or a column is not there.
    """
    check_digest(path)
    try:
        import datasets
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{path} is read by the package datasets, which is missing: pip install datasets.") from None
    # Streamed, so that nothing is copied into the cache of `datasets`; the folder is for what it makes regardless.
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs what it raises
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if not pq.read_metadata(path).num_rows:
                raise damaged(path, "has no rows")
            rows = datasets.load_dataset(
                "parquet",
                data_files={"train": [glob.escape(str(path))]},
                split="train",
                streaming=True,
                cache_dir=scratch,
            )
            missing = set(names) - set(rows.column_names)
            if missing:
                raise damaged(path, f"has no column {' and '.join(sorted(missing))}")
            rows = rows.select_columns(list(names))
            for name, feature in rows.features.items():
                if isinstance(feature, (datasets.Image, datasets.Audio)):
                    rows = rows.cast_column(name, type(feature)(decode=False))
            batches = list(rows.iter(batch_size=ROWS_PER_READ))
        except UserError:
            raise
        # Apache Arrow, fsspec and datasets raise their own kinds for a file that is damaged.
        except Exception as error:
            raise damaged(path, f"cannot be read as Parquet ({one_line(error)})") from None
        finally:
            datasets.logging.set_verbosity(verbosity)
    return {name: [value for batch in batches for value in batch[name]] for name in names}
