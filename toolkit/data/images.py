"""Sets of small grey images with labels, decoded once: MNIST, Fashion-MNIST, and the digits inside scikit-learn."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.data.cache import cached_columns
from toolkit.data.files import (
    SPLITS,
    NotFoundHere,
    content_key,
    damaged,
    data_folder,
    parquet_splits,
    read_columns,
    unreadable,
)
from toolkit.data.hub import find_on_hub
from toolkit.data.table import TensorTable
from toolkit.errors import UserError, one_line

HUB_REPOS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
HUB_PATTERNS = ("*train-*.parquet", "*test-*.parquet")
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
    files: dict[str, list[Path]] | None
    key: str
    notice: str | None = None

    def columns(self, data_dir: Path | None) -> dict[str, Tensor]:
        return cached_columns(self.key, lambda: self._decode(data_dir))

    def _decode(self, data_dir: Path | None) -> dict[str, np.ndarray]:
        if self.files is None:
            columns = read_digits()
        elif all(path.exists() for path in [*self.files["train"], *self.files["test"]]):
            columns = read_files(self.files)
        else:  # another machine than the main process's: find or download the set there
            columns = read_files(locate(self.name, data_dir))
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
    digits = f"digits-v{CACHE_FORMAT}"
    if dataset == "digits":
        if data_dir is not None:
            raise UserError(f"data_dir={str(data_dir)!r}: the digits come with scikit-learn; leave data_dir out.")
        return _Choice("digits", None, digits)
    name = "mnist" if dataset == "auto" else dataset
    try:
        files = locate(name, data_dir)
    except NotFoundHere as reason:
        if data_dir is not None:
            raise UserError(
                f"data_dir={str(data_dir)!r}: {reason}; name the folder of the set, or the one that holds {name}/."
            ) from None
        if dataset != "auto":
            raise UserError(f"{TITLES[name]} was not found: {reason}; give data_dir with its Parquet files.") from None
        notice = (
            f"MNIST could not be reached ({reason}); "
            "training on scikit-learn's 1,797 handwritten digits, scaled to 28x28."
        )
        return _Choice("digits", None, digits, notice)
    return _Choice(name, files, f"{name}-{content_key([*files['train'], *files['test']])}-v{CACHE_FORMAT}")


def locate(name: str, data_dir: Path | None) -> dict[str, list[Path]]:
    """Find the files of set `name` in the first place that has them.

    Args:
        name: The set, one of `HUB_REPOS`.
        data_dir: The only place where it is looked for; None means $TOOLKIT_DATA_DIR, the Hub's cache and the Hub.

    Returns:
        The files of each split.

    Raises:
        NotFoundHere: No place has them; every place that was searched is named, within seconds, downloads aside.
    """
    if data_dir is not None:
        return _in_folder(data_dir.expanduser(), name)
    reasons = []
    for place in ("environment", "cache", "hub"):
        try:
            if place == "environment":
                return _in_folder(data_folder(None), name)
            return find_on_hub(HUB_REPOS[name], HUB_PATTERNS, lambda at: _in_folder(at, name), ask=place == "hub")
        except NotFoundHere as reason:
            reasons.append(str(reason))
    raise NotFoundHere("; ".join(reasons))


def _in_folder(folder: Path, name: str) -> dict[str, list[Path]]:
    """The files of `name` in `folder/name`, or in `folder` itself, unless it is called after another set."""
    own = [] if folder.name in HUB_REPOS and folder.name != name else [folder]
    try:
        for place in (folder / name, *own):
            if files := parquet_splits(place):
                return files
    except OSError as error:
        raise unreadable(error) from None
    raise NotFoundHere(f"{folder} does not hold train-*.parquet and test-*.parquet of {TITLES[name]}")


def read_files(files: dict[str, list[Path]]) -> dict[str, np.ndarray]:
    """Read the columns "image" (encoded, such as PNG) and "label" of Parquet files.

    Args:
        files: The files of each split.

    Returns:
        The columns train_input (N, 28, 28) uint8, train_label (N,) int64, test_input and test_label.

    Raises:
        UserError: A file is damaged, or holds what cannot be right.
    """
    columns: dict[str, np.ndarray] = {}
    for split, paths in files.items():
        parts = [(path, read_columns(path, ("image", "label"))) for path in paths]
        images = [image for path, part in parts for image in _decoded(path, part["image"])]
        labels = [label for path, part in parts for label in _labels(path, part["label"])]
        columns |= {f"{split}_input": np.stack(images), f"{split}_label": np.array(labels, dtype=np.int64)}
    return columns


def _labels(path: Path, labels: list[Any]) -> list[int]:
    for row, label in enumerate(labels):
        if label not in range(NUM_CLASSES):
            raise damaged(path, f"has the label {label} in row {row}, which is not from 0 to {NUM_CLASSES - 1}")
    return labels


def _decoded(path: Path, images: list[Any]) -> Iterator[np.ndarray]:
    """Grey images (28, 28) uint8 from structs with the encoded `bytes`."""
    from PIL import Image

    for row, image in enumerate(images):
        try:
            pixels = np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("L"))
        except Exception as error:
            raise damaged(path, f"has an image that cannot be decoded in row {row} ({one_line(error)})") from None
        if pixels.shape != (SIZE, SIZE):
            raise damaged(path, f"has an image of shape {pixels.shape} in row {row} where ({SIZE}, {SIZE}) is needed")
        yield pixels


def read_digits() -> dict[str, np.ndarray]:
    """scikit-learn's 1,797 handwritten digits (8x8, 17 grey levels), as columns like those of `read_files`.

    Every fifth image of each class is held out, in the order of the file, so that both splits have all writers.
    """
    from sklearn.datasets import load_digits

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
