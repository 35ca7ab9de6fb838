"""Tiny image data sets in published layouts."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image


def make_split(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw images of shape (count, 28, 28) and labels."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 28, 28), dtype=np.uint8), random.integers(0, 10, count)


REVISION = "0123456789abcdef0123456789abcdef01234567"
TRAIN, TEST = make_split(7, seed=0), make_split(3, seed=1)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path: Path, images: list, labels: list, *, named: str | None = None, **renamed: str) -> None:
    """Write a Parquet file in the Hub's format, with `named` as the path of each image and `renamed` columns."""
    columns = {
        renamed.get("image", "image"): [{"bytes": image, "path": named} for image in images],
        renamed.get("label", "label"): labels,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table(columns), path)


def write_parquet_set(folder: Path) -> Path:
    """Write the training split in two shards, and the test split."""
    images, labels = [png(image) for image in TRAIN[0]], TRAIN[1].tolist()
    write_parquet(folder / "train-00000-of-00002.parquet", images[:4], labels[:4])
    write_parquet(folder / "train-00001-of-00002.parquet", images[4:], labels[4:])
    write_parquet(folder / "test-00000-of-00001.parquet", [png(image) for image in TEST[0]], TEST[1].tolist())
    return folder


def fill_hub_cache(hub: Path, repo: str, inner: str) -> Path:
    """Write an image data set to the Hub's cache of `repo`."""
    store = hub / f"datasets--{repo.replace('/', '--')}"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text(REVISION)
    return write_parquet_set(store / "snapshots" / REVISION / inner)
