"""Sets of small grey images with labels, decoded once: MNIST, Fashion-MNIST, and the digits inside scikit-learn."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.data.cache import cached_columns
from toolkit.data.files import content_key, damaged, read_columns
from toolkit.data.sources import HUB_REPOS, SPLITS, TITLES, ImageFiles, NotFoundHere, locate
from toolkit.data.table import TensorTable
from toolkit.errors import UserError, one_line

SIZE = 28
NUM_CLASSES = 10
CACHE_FORMAT = 1
"""Goes up when what is cached for the same files changes."""


@dataclass(frozen=True)
class ImageData:
    """Two tables with the columns "input" (N, 28, 28) uint8 and "label" (N,) int64."""

    name: str
    """The name of the set: mnist, fashion_mnist or digits."""
    train: TensorTable
    test: TensorTable
    mean: float
    """The mean of the training pixels, on a scale from 0 to 1."""
    std: float
    """Their standard deviation."""
    notice: str | None = None
    """A sentence for the user, when this is not the set that was asked for."""
    num_classes: int = NUM_CLASSES


class OnMain(Protocol):
    """`Run.on_main_and_share`: runs a function on the main process; its result, or UserError, reaches every rank."""

    def __call__(self, decide: Callable[[], Any], /) -> Any: ...


@dataclass(frozen=True)
class _Choice:
    """What the main process chose."""

    name: str
    files: ImageFiles | None
    key: str
    notice: str | None = None

    def columns(self, data_dir: Path | None) -> dict[str, Tensor]:
        return cached_columns(self.key, lambda: self._decode(data_dir))

    def _decode(self, data_dir: Path | None) -> dict[str, np.ndarray]:
        if self.files is None:
            columns = read_digits()
        elif all(path.exists() for path in (*self.files.train, *self.files.test)):
            columns = read_files(self.files)
        else:  # another machine than the main process's: find or download the set there
            columns = read_files(_locate(self.name, data_dir))
        columns["pixel_mean_std"] = _mean_std(columns["train_input"])
        return columns


VALIDATION = ":validation"
"""Behind the name of a set: its training split alone, of which a twelfth takes the place of the test set."""


def load_images(dataset: str, data_dir: Path | None, *, on_main: OnMain) -> ImageData:
    """Load a set of images. The main process chooses, checks and decodes the files, and the others map the result.

    Args:
        dataset: "mnist", "fashion_mnist", "digits", or "auto" for MNIST where it is available, else the digits.
            `VALIDATION` behind it gives `held_out` of the set, for choices.
        data_dir: The folder of the set, or one that holds it; None looks in $TOOLKIT_DATA_DIR and on the Hub.
        on_main: `Run.on_main_and_share`.

    Returns:
        Its two tables, and what a model has to know of them.

    Raises:
        UserError: On every rank, the set is not found, or a file is invalid.
    """
    if dataset.endswith(VALIDATION):
        return held_out(load_images(dataset.removesuffix(VALIDATION), data_dir, on_main=on_main))
    columns: dict[str, Tensor] = {}

    def decide() -> _Choice:
        choice = _choose(dataset, data_dir)
        columns.update(choice.columns(data_dir))
        return choice

    choice: _Choice = on_main(decide)
    columns = columns or choice.columns(data_dir)
    train, test = (TensorTable(input=columns[f"{s}_input"], label=columns[f"{s}_label"]) for s in SPLITS)
    mean, std = columns["pixel_mean_std"].tolist()
    return ImageData(choice.name, train, test, mean, std, choice.notice)


def held_out(data: ImageData) -> ImageData:
    """The training set without its last twelfth (5,000 images of MNIST), which is in place of the test set.

    Mean and standard deviation stay those of the whole training set.
    """
    table = data.train
    rows = torch.arange(len(table))
    cut = len(table) - len(table) // 12
    return replace(
        data,
        name=data.name + VALIDATION,
        train=TensorTable(**table[rows[:cut]]),
        test=TensorTable(**table[rows[cut:]]),
    )


def _choose(dataset: str, data_dir: Path | None) -> _Choice:
    if dataset not in ("auto", "digits", *HUB_REPOS):
        names = ", ".join(("auto", *HUB_REPOS, "digits"))
        raise UserError(f"dataset={dataset!r}: there is no such set; choose one of {names}.")
    if dataset == "digits":
        if data_dir is not None:
            raise UserError(f"data_dir={str(data_dir)!r}: the digits come with scikit-learn; leave data_dir out.")
        return _digits()
    name = "mnist" if dataset == "auto" else dataset
    try:
        files = locate(name, data_dir) if dataset == "auto" and data_dir is None else _locate(name, data_dir)
    except NotFoundHere as reason:
        return _digits(
            f"{TITLES[name]} could not be reached ({reason}); "
            "training on scikit-learn's 1,797 handwritten digits, scaled to 28x28."
        )
    return _Choice(name, files, f"{name}-{content_key((*files.train, *files.test))}-v{CACHE_FORMAT}")


def _digits(notice: str | None = None) -> _Choice:
    return _Choice("digits", None, f"digits-v{CACHE_FORMAT}", notice)


def _locate(name: str, data_dir: Path | None) -> ImageFiles:
    """`locate`, with a UserError for a set that is not found."""
    try:
        return locate(name, data_dir)
    except NotFoundHere as reason:
        if data_dir is not None:
            raise UserError(
                f"data_dir={str(data_dir)!r}: {reason}; name the folder of the set, or the one that holds {name}/."
            ) from None
        raise UserError(
            f"{TITLES[name]} was not found: {reason}; give data_dir with its Parquet or idx files."
        ) from None


def read_files(files: ImageFiles) -> dict[str, np.ndarray]:
    """Columns train_input, train_label, test_input and test_label. Raises UserError naming an invalid file."""
    columns = {}
    for split, paths in (("train", files.train), ("test", files.test)):
        if files.kind == "idx":
            images, labels = _checked(paths[0], read_idx(paths[0]), read_idx(paths[1]), labels_path=paths[1])
        else:
            parts = [_checked(path, *read_parquet(path)) for path in paths]
            images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        columns[f"{split}_input"], columns[f"{split}_label"] = images, labels
    return columns


def _checked(
    path: Path, images: np.ndarray, labels: np.ndarray, labels_path: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    labels_path = labels_path or path
    if images.ndim != 3 or images.shape[1:] != (SIZE, SIZE) or not len(images):
        raise damaged(path, f"holds images of shape {images.shape} where (N, {SIZE}, {SIZE}) is needed")
    if labels.shape != images.shape[:1]:
        raise damaged(labels_path, f"holds labels of shape {labels.shape} for {len(images)} images")
    for row in np.flatnonzero((labels < 0) | (labels >= NUM_CLASSES)):
        fault = f"holds the label {labels[row]} in row {row}, which is not between 0 and {NUM_CLASSES - 1}"
        raise damaged(labels_path, fault)
    for row in np.flatnonzero(~images.any((1, 2))):
        raise damaged(path, f"has an image that is all black in row {row}")
    return images, labels.astype(np.int64)


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array in a file of the MNIST publishers' format, packed or not.

    Two zero bytes, the element type (8 is uint8), the number of dimensions, their sizes as big-endian int32, the data.
    Raises UserError for a file that is damaged or cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"cannot be read ({error})") from None
    ndim = content[3] if len(content) > 3 else 0
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * ndim:
        raise damaged(path, "is not an idx file of bytes")
    shape = tuple(np.frombuffer(content, ">i4", count=ndim, offset=4).tolist())
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * ndim)
    if data.size != math.prod(shape):
        raise damaged(path, f"holds {data.size} bytes of data where its header says {math.prod(shape)}")
    return data.reshape(shape).copy()


def read_parquet(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The columns "image" (encoded, such as PNG) and "label" of a Parquet file: uint8 (N, 28, 28) and int64 (N).

    Raises UserError for a file that is damaged or cannot be read.
    """
    columns = read_columns(path, ("image", "label"))
    for row, label in enumerate(columns["label"]):
        if not isinstance(label, int):
            raise damaged(path, f"has the label {label} in row {row}, which is not a whole number")
    return decode_images(path, columns["image"]), np.array(columns["label"], dtype=np.int64)


def decode_images(path: Path, encoded: Iterable[Any]) -> np.ndarray:
    """Grey images (N, 28, 28) uint8 from structs with the encoded `bytes`, which are from the file `path`.

    Raises UserError for one that cannot be decoded, or has another size.
    """
    from PIL import Image

    def decode(row: int, image: Any) -> np.ndarray:
        try:
            pixels = np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("L"))
        except Exception as error:
            raise damaged(path, f"has an image that cannot be decoded in row {row} ({one_line(error)})") from None
        if pixels.shape != (SIZE, SIZE):
            raise damaged(path, f"has an image of shape {pixels.shape} in row {row} where ({SIZE}, {SIZE}) is needed")
        return pixels

    images = [decode(row, image) for row, image in enumerate(encoded)]
    return np.stack(images) if images else np.empty((0, SIZE, SIZE), np.uint8)


def read_digits() -> dict[str, np.ndarray]:
    """scikit-learn's 1,797 handwritten digits (8x8, 17 grey levels), as columns like those of `read_files`.

    Every fifth image of each class is held out, in the order of the file, so that both splits have all writers. Raises
    UserError where scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("The digits come with scikit-learn, which is missing: pip install scikit-learn.") from None
    digits = load_digits()
    small = torch.from_numpy(digits.images).to(torch.float32)[:, None] * (255 / 16)
    scaled = F.interpolate(small, size=(SIZE, SIZE), mode="bilinear")[:, 0]
    images = scaled.round().to(torch.uint8).numpy()
    labels = digits.target.astype(np.int64)
    held_out = np.zeros(len(labels), bool)
    for label in range(NUM_CLASSES):
        held_out[np.flatnonzero(labels == label)[4::5]] = True
    return {
        "train_input": images[~held_out],
        "train_label": labels[~held_out],
        "test_input": images[held_out],
        "test_label": labels[held_out],
    }


def _mean_std(images: np.ndarray) -> np.ndarray:
    """Mean and standard deviation of the pixels, on a scale from 0 to 1: exact, from their histogram."""
    counts = sum(np.bincount(image.ravel(), minlength=256) for image in images)
    levels = np.arange(256) / 255
    mean = np.average(levels, weights=counts)
    return np.array([mean, np.sqrt(np.average((levels - mean) ** 2, weights=counts))])
