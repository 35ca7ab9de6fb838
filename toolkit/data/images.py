"""Labelled image data sets, decoded once: MNIST, Fashion-MNIST, scikit-learn's digits, and your own files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.data.cache import OnMain, Source, shared_columns, words_column, words_of
from toolkit.data.files import SPLITS, NotFoundHere, data_folder, parquet_splits, read_file
from toolkit.data.hub import find_on_hub
from toolkit.data.rows import HELD_OUT, find_column, folders_of, is_own, load_splits, train_and_test
from toolkit.data.table import TensorTable
from toolkit.errors import UserError, reading
from toolkit.experts.parallel.seeding import generator

HUB_REPOS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
HUB_PATTERNS = ("*train-*.parquet", "*test-*.parquet")
SIZE = 28
NUM_CLASSES = 10
CACHE_FORMAT = 2
"""Version of the cached columns. Increase it when the same files give other columns."""
VALIDATION = ":validation"
"""Suffix of a data set's name: evaluate on the held-out part of the training split instead of the test split."""


@dataclass(frozen=True)
class ImageData:
    """Training and test tables with the columns "input" and "label".

    "input" is uint8 in 0..255, of shape (N, height, width) for grayscale and (N, 3, height, width) for colour images;
    "label" is int64 of shape (N,).
    """

    name: str
    """Name of the data set: mnist, fashion_mnist, digits, a folder or file name, or a Hub name."""
    train: TensorTable
    test: TensorTable
    mean: float
    """Mean of the training pixels, scaled to 0..1."""
    std: float
    """Standard deviation of the training pixels, scaled to 0..1."""
    notice: str | None = None
    """Message for the user if another data set was loaded, or if a split was drawn."""
    num_classes: int = NUM_CLASSES
    validation: TensorTable | None = None
    """Held-out part of the training split, for model selection."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image."""
        return tuple(self.train.columns["input"].shape[1:])

    @property
    def num_pixels(self) -> int:
        """Number of values in one image, all channels included."""
        return math.prod(self.shape)


def load_images(dataset: str, data_dir: str | Path | None, *, validation: bool = False, on_main: OnMain) -> ImageData:
    """Load an image data set.

    The main process finds, checks and decodes the files. The other ranks memory-map the result.

    Args:
        dataset: "mnist", "fashion_mnist", "digits", or "auto" (MNIST if available, else the digits), or your own
            data set: a folder with one subfolder of images per class, Parquet files with an image and a label column,
            or "owner/name" on the Hub. With the suffix `VALIDATION`, the part that `validation` holds out replaces the
            test split.
        data_dir: Folder of the data set, or its parent. Default: $TOOLKIT_DATA_DIR, then the Hub.
        validation: Hold out a part of the training data: the split `validation` if there is one, else the last twelfth
            of a named data set, or a seeded tenth of each class of your own.
        on_main: `Run.on_main_and_share`.

    Returns:
        The tables, pixel statistics and number of classes.

    Raises:
        UserError: The data set is not found or a file is invalid; raised on every rank.
    """
    if dataset.endswith(VALIDATION):
        held = load_images(dataset.removesuffix(VALIDATION), data_dir, validation=True, on_main=on_main)
        assert held.validation is not None
        return replace(held, name=held.name + VALIDATION, test=held.validation, validation=None)
    name, notice, columns = shared_columns(dataset, lambda: _find(dataset, data_dir), on_main)
    tables = {
        split: TensorTable(input=columns[f"{split}_input"], label=columns[f"{split}_label"])
        for split in (*SPLITS, "validation")
        if f"{split}_input" in columns
    }
    mean, std = columns["pixel_mean_std"].tolist()
    classes = len(words_of(columns["classes"]))
    data = ImageData(name, tables["train"], tables["test"], mean, std, notice, classes)
    if not validation or "validation" in tables:
        return replace(data, validation=tables["validation"] if validation else None)
    rows = torch.arange(len(data.train))
    held_out = rows >= len(rows) - len(rows) // 12
    if is_own(dataset):
        held_out = _drawn(data.train.columns["label"])
        said = f"{int(held_out.sum()):,} of {len(rows):,} training images, drawn with seed 0, are for validation."
        notice = f"{notice} {said}" if notice else f"{name}: {said}"
    train, apart = (TensorTable(**data.train[rows[which]]) for which in (~held_out, held_out))
    return replace(data, train=train, validation=apart, notice=notice)


def _drawn(labels: Tensor) -> Tensor:
    """Return a mask of a seeded tenth of each class, because your own files may be sorted by class."""
    order = torch.randperm(len(labels), generator=generator(0, "validation images"))
    by_class = order[labels[order].argsort(stable=True)]
    held_out = torch.zeros(len(order), dtype=torch.bool)
    held_out[by_class[:: round(1 / HELD_OUT)]] = True
    return held_out


def _find(dataset: str, data_dir: str | Path | None) -> Source:
    if dataset not in ("auto", "digits", *HUB_REPOS):
        if is_own(dataset):
            return _find_own(dataset)
        names = ", ".join(("auto", *HUB_REPOS, "digits"))
        raise UserError(
            f"dataset={dataset!r}: is no dataset. Choose one of {names}, a folder, or owner/name of the Hub."
        )
    digits = Source("digits", f"digits-v{CACHE_FORMAT}", lambda: _with_facts(read_digits(), map(str, range(10))))
    if dataset == "digits":
        if data_dir is not None:
            raise UserError(f"data_dir={str(data_dir)!r}: the digits come with scikit-learn. Leave data_dir out.")
        return digits
    name = "mnist" if dataset == "auto" else dataset
    try:
        folder = locate(name, data_dir)
    except NotFoundHere as reason:
        if data_dir is not None:
            raise UserError(
                f"data_dir={str(data_dir)!r}: {reason}. Give the folder of the dataset, or the folder that has {name}/."
            ) from None
        if dataset != "auto":
            raise UserError(
                f"dataset: {TITLES[name]} was not found ({reason}). Give data_dir with its Parquet files."
            ) from None
        return replace(digits, notice="No MNIST (dataset='mnist' says why): training on scikit-learn's 1,797 digits.")
    return replace(_find_own(str(folder), range(NUM_CLASSES)), name=name)


def locate(name: str, data_dir: str | Path | None) -> Path:
    """Find the folder of data set `name`: $TOOLKIT_DATA_DIR, then the Hub's cache, then the Hub.

    Args:
        name: Data set, one of `HUB_REPOS`.
        data_dir: Search this folder only.

    Returns:
        The folder with the Parquet files of "train" and "test".

    Raises:
        NotFoundHere: The data set is not found. The message names every place that was searched.
    """
    if data_dir is not None:
        return _in_folder(Path(data_dir).expanduser(), name)
    reasons = []
    for place in ("environment", "cache", "hub"):
        try:
            if place == "environment":
                return _in_folder(data_folder(None), name)
            return find_on_hub(HUB_REPOS[name], HUB_PATTERNS, lambda at: _in_folder(at, name), ask=place == "hub")
        except NotFoundHere as reason:
            reasons.append(str(reason))
    raise NotFoundHere("; ".join(reasons))


def _in_folder(folder: Path, name: str) -> Path:
    """Return `folder/name` or `folder`, unless `folder` is named after another data set."""
    own = [] if folder.name in HUB_REPOS and folder.name != name else [folder]
    for place in (folder / name, *own):
        if parquet_splits(place):
            return place
    raise NotFoundHere(f"{folder} does not hold train-*.parquet and test-*.parquet of {TITLES[name]}")


def decode_images(images: Iterable[Any], where: str, folders: Sequence[Path]) -> Iterator[np.ndarray]:
    """Decode images with 8 or 16 bits per channel; 16-bit channels keep their upper 8 bits.

    Args:
        images: Structs with the encoded `bytes`, or the `path` of a file.
        where: Source of the images, for error messages.
        folders: Folders that may have the files.

    Yields:
        uint8 arrays of shape (height, width) for grayscale and (3, height, width) for colour images.

    Raises:
        UserError: An image cannot be decoded.
    """
    from PIL import Image

    for row, encoded in enumerate(images):
        path = encoded and encoded["path"]
        with reading(f"{where}: row {row}{f', {path}' if path else ''}", "Replace the image."):
            content = read_file(encoded["path"], *folders) if encoded["bytes"] is None else encoded["bytes"]
            with Image.open(io.BytesIO(content)) as image:
                if image.mode == "F":
                    raise ValueError("its pixels are fractions of unknown scale")
                if image.mode.startswith("I"):  # Pillow clips values above 255
                    yield (np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)
                elif image.mode in ("L", "1", "LA"):
                    yield np.asarray(image.convert("L"))
                else:
                    yield np.asarray(image.convert("RGB")).transpose(2, 0, 1)


# --- your own ----------------------------------------------------------------------------------------------------


def _find_own(dataset: str, labels: Sequence[Any] | None = None) -> Source:
    """Find the splits of a folder, file or Hub name. Default of `labels`: the classes in its rows."""
    import datasets

    splits, key = load_splits(dataset)
    parts, said = train_and_test(splits)
    train = parts["train"]
    image = find_column(dataset, train, "image", ("image", "img"), (datasets.Image,))
    label = find_column(dataset, train, "label", ("label", "labels"), (datasets.ClassLabel,))
    name = Path(dataset).name if Path(dataset).exists() else dataset
    notice = said and f"{name}: {said}"
    # The same files have other classes if they are read as a named data set.
    entry = f"images-{key}{'' if labels is None else f'-{len(labels)}'}-v{CACHE_FORMAT}"
    return Source(name, entry, partial(_read_own, dataset, parts, image, label, labels), notice)


def _read_own(
    dataset: str, parts: dict[str, Any], image: str, label: str, labels: Sequence[Any] | None
) -> dict[str, np.ndarray]:
    import datasets

    columns: dict[str, np.ndarray] = {}
    known = set(parts["train"][label] if labels is None else labels)
    kind = parts["train"].features[label]
    classes = list(kind.names) if isinstance(kind, datasets.ClassLabel) else sorted(set(parts["train"][label]))
    if labels is not None:
        classes = [*labels]
    elif not isinstance(kind, datasets.ClassLabel) and isinstance(classes[0], int):
        # More classes than images would be ids of something else.
        classes = list(range(classes[-1] + 1)) if classes[-1] < len(parts["train"]) else classes
    for split, rows in parts.items():
        where = f"dataset={dataset!r}: the {split} split"
        encoded = rows.cast_column(image, datasets.Image(decode=False))[image]
        images = list(decode_images(encoded, where, folders_of(dataset)))
        if any(pixels.ndim == 3 for pixels in images):
            images = [pixels if pixels.ndim == 3 else np.stack([pixels] * 3) for pixels in images]
        wanted = columns["train_input"].shape[1:] if columns else images[0].shape
        for row, pixels in enumerate(images):
            if pixels.shape != wanted:
                raise UserError(
                    f"{where}: the image of row {row} has shape {pixels.shape}, and others {wanted}. "
                    "Scale all images to one size, all in color or all in gray."
                )
        written = list(rows[label])
        for row, value in enumerate(written):
            if value not in known or value in (None, -1):
                raise UserError(
                    f"{where}: no training row has the label {value!r} of row {row}. Correct it, or add training data."
                )
        if not isinstance(kind, datasets.ClassLabel):
            places = {name: place for place, name in enumerate(classes)}
            written = [places[value] for value in written]
        columns |= {f"{split}_input": np.stack(images), f"{split}_label": np.array(written, dtype=np.int64)}
    return _with_facts(columns, map(str, classes))


def _with_facts(columns: dict[str, np.ndarray], classes: Iterable[str]) -> dict[str, np.ndarray]:
    """Add mean and standard deviation of the training pixels, and the class names."""
    mean_std = _mean_std(columns["train_input"])
    if not mean_std[1]:
        raise UserError("dataset: all pixels of the training images have one value. Check the files.")
    return columns | {"pixel_mean_std": mean_std, "classes": words_column([*classes])}


def read_digits() -> dict[str, np.ndarray]:
    """Read scikit-learn's 1,797 handwritten digits (8x8, 17 gray levels) as columns.

    Every fifth image of each class is held out, in file order, so that both splits contain all writers.
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
    """Compute mean and standard deviation of the pixels, scaled to 0..1, exactly from their histogram."""
    counts = sum(np.bincount(image.ravel(), minlength=256) for image in images)
    levels = np.arange(256) / 255
    mean = np.average(levels, weights=counts)
    return np.array([mean, np.sqrt(np.average((levels - mean) ** 2, weights=counts))])
