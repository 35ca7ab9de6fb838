"""Sets of images with labels, decoded once: MNIST, Fashion-MNIST, the digits inside scikit-learn, and your own."""

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
from toolkit.data.files import (
    SPLITS,
    NotFoundHere,
    data_folder,
    parquet_splits,
)
from toolkit.data.hub import find_on_hub
from toolkit.data.rows import HELD_OUT, find_column, is_own, load_splits, train_and_test
from toolkit.data.table import TensorTable
from toolkit.errors import UserError, one_line
from toolkit.experts.parallel.seeding import generator

HUB_REPOS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
HUB_PATTERNS = ("*train-*.parquet", "*test-*.parquet")
SIZE = 28
NUM_CLASSES = 10
CACHE_FORMAT = 2
"""Goes up when what is cached for the same files changes."""
VALIDATION = ":validation"
"""Behind the name of a set: its training split alone, of which a twelfth takes the place of the test set."""


@dataclass(frozen=True)
class ImageData:
    """Two tables with the columns "input" uint8 and "label" (N,) int64: grey images are (N, height, width), those with
    colours (N, 3, height, width)."""

    name: str
    """The name of the set: mnist, fashion_mnist, digits, or that of a folder, a file or a set of the Hub."""
    train: TensorTable
    test: TensorTable
    mean: float
    """The mean of the training pixels, on a scale from 0 to 1."""
    std: float
    """Their standard deviation."""
    notice: str | None = None
    """A sentence for the user, when this is not the set that was asked for, or how it was split."""
    num_classes: int = NUM_CLASSES
    validation: TensorTable | None = None
    """A part of the training split that is not trained on, for choices."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return tuple(self.train.columns["input"].shape[1:])

    @property
    def num_pixels(self) -> int:
        """Numbers in one image, over all its channels."""
        return math.prod(self.shape)


def load_images(dataset: str, data_dir: Path | None, *, validation: bool = False, on_main: OnMain) -> ImageData:
    """Load a set of images. The main process chooses, checks and decodes the files, and the others map the result.

    Args:
        dataset: "mnist", "fashion_mnist", "digits", or "auto" for MNIST where it is available, else the digits; or a
            set of your own: a folder with a folder of images for each class, Parquet files with a column of images and
            one of labels, or "owner/name" of the Hub. `VALIDATION` behind it has the part that `validation` holds out
            in place of the test set, which is not read.
        data_dir: The folder of the set, or one that holds it; None looks in $TOOLKIT_DATA_DIR and on the Hub.
        validation: Hold out a part of the training split: its split `validation`; else the last twelfth of a named set,
            and of your own a seeded tenth of each class.
        on_main: `Run.on_main_and_share`.

    Returns:
        Its tables, and what a model has to know of them.

    Raises:
        UserError: On every rank, the set is not found, or a file is invalid.
    """
    if dataset.endswith(VALIDATION):
        held = load_images(dataset.removesuffix(VALIDATION), data_dir, validation=True, on_main=on_main)
        assert held.validation is not None
        return replace(held, name=held.name + VALIDATION, test=held.validation, validation=None)
    name, notice, columns = shared_columns(lambda: _find(dataset, data_dir), on_main)
    tables = {split: _table(columns, split) for split in SPLITS}
    mean, std = columns["pixel_mean_std"].tolist()
    classes = len(words_of(columns["classes"]))
    data = ImageData(name, tables["train"], tables["test"], mean, std, notice, classes)
    if not validation:
        return data
    if "validation_input" in columns:
        return replace(data, validation=_table(columns, "validation"))
    if is_own(dataset):
        held = drawn(data)
        said = f"{len(held.test):,} of {len(data.train):,} training images, drawn with seed 0, are for validation."
        notice = f"{notice} {said}" if notice else f"{name}: {said}"
    else:
        held = held_out(data)
    return replace(data, train=held.train, validation=held.test, notice=notice)


def _table(columns: dict[str, Tensor], split: str) -> TensorTable:
    return TensorTable(input=columns[f"{split}_input"], label=columns[f"{split}_label"])


def held_out(data: ImageData) -> ImageData:
    """The training set without its last twelfth (5,000 images of MNIST), which is in place of the test set.

    Mean and standard deviation stay those of the whole training set.
    """
    last = len(data.train) // 12
    return _apart(data, torch.arange(len(data.train)) >= len(data.train) - last)


def drawn(data: ImageData) -> ImageData:
    """As `held_out`, but a seeded tenth of each class: the files of one's own set may lie class by class."""
    order = torch.randperm(len(data.train), generator=generator(0, "validation images"))
    by_class = order[data.train.columns["label"][order].argsort(stable=True)]
    held = torch.zeros(len(order), dtype=torch.bool)
    held[by_class[:: round(1 / HELD_OUT)]] = True
    return _apart(data, held)


def _apart(data: ImageData, held: Tensor) -> ImageData:
    rows = torch.arange(len(held))
    train, test = (TensorTable(**data.train[rows[which]]) for which in (~held, held))
    return replace(data, name=data.name + VALIDATION, train=train, test=test)


def _find(dataset: str, data_dir: Path | None) -> Source:
    if dataset not in ("auto", "digits", *HUB_REPOS):
        if is_own(dataset):
            return _find_own(dataset)
        names = ", ".join(("auto", *HUB_REPOS, "digits"))
        raise UserError(
            f"dataset={dataset!r}: there is no such set; choose one of {names}, a folder, or owner/name of the Hub."
        )
    digits = Source("digits", f"digits-v{CACHE_FORMAT}", lambda: _with_facts(read_digits(), map(str, range(10))))
    if dataset == "digits":
        if data_dir is not None:
            raise UserError(f"data_dir={str(data_dir)!r}: the digits come with scikit-learn; leave data_dir out.")
        return digits
    name = "mnist" if dataset == "auto" else dataset
    try:
        folder = locate(name, data_dir)
    except NotFoundHere as reason:
        if data_dir is not None:
            raise UserError(
                f"data_dir={str(data_dir)!r}: {reason}; name the folder of the set, or the one that holds {name}/."
            ) from None
        if dataset != "auto":
            raise UserError(f"{TITLES[name]} was not found: {reason}; give data_dir with its Parquet files.") from None
        return replace(digits, notice="No MNIST (dataset='mnist' says why): training on scikit-learn's 1,797 digits.")
    return replace(_find_own(str(folder), range(NUM_CLASSES)), name=name)


def locate(name: str, data_dir: Path | None) -> Path:
    """Find the folder of set `name` in the first place that has it.

    Args:
        name: The set, one of `HUB_REPOS`.
        data_dir: The only place where it is looked for; None means $TOOLKIT_DATA_DIR, the Hub's cache and the Hub.

    Returns:
        The folder with the Parquet files of "train" and "test".

    Raises:
        NotFoundHere: No place has it; every place that was searched is named, within seconds, downloads aside.
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


def _in_folder(folder: Path, name: str) -> Path:
    """Return `folder/name` or `folder`, unless `folder` has the name of another set."""
    own = [] if folder.name in HUB_REPOS and folder.name != name else [folder]
    for place in (folder / name, *own):
        if parquet_splits(place):
            return place
    raise NotFoundHere(f"{folder} does not hold train-*.parquet and test-*.parquet of {TITLES[name]}")


def decode_images(images: Iterable[Any], where: str) -> Iterator[np.ndarray]:
    """Decode images with 8 bits per channel, or with 16, of which the upper 8 are taken.

    Args:
        images: Structs with the encoded `bytes`, or the `path` of a file.
        where: What they are from, for a message.

    Yields:
        Arrays uint8 (height, width), or (3, height, width) of an image with colours.

    Raises:
        UserError: One of them cannot be decoded.
    """
    from PIL import Image

    for row, encoded in enumerate(images):
        try:
            content = encoded["bytes"]
            with Image.open(encoded["path"] if content is None else io.BytesIO(content)) as image:
                if image.mode == "F":
                    raise ValueError("its pixels are fractions, whose scale nobody knows")
                if image.mode.startswith("I"):  # Pillow would cut off all values above 255
                    yield (np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)
                elif image.mode in ("L", "1", "LA"):
                    yield np.asarray(image.convert("L"))
                else:
                    yield np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except Exception as error:
            raise UserError(
                f"{where} has an image that cannot be decoded in row {row} ({one_line(error)}): replace it."
            ) from None


# --- your own ----------------------------------------------------------------------------------------------------


def _find_own(dataset: str, labels: Sequence[Any] | None = None) -> Source:
    """Find the splits of a folder, a file or a Hub name; its classes are `labels` if given, else found in its rows."""
    import datasets

    splits, key = load_splits(dataset)
    train, test, said = train_and_test(splits)
    image = find_column(dataset, train, "image", ("image", "img"), (datasets.Image,))
    label = find_column(dataset, train, "label", ("label", "labels"), (datasets.ClassLabel,))
    parts = {"train": train, "test": test}
    if "validation" in splits and splits["validation"] not in (train, test):
        parts["validation"] = splits["validation"]
    name = Path(dataset).name if Path(dataset).exists() else dataset
    notice = said and f"{name}: {said}"
    # The same files have other classes if they are read as a named set.
    entry = f"images-{key}{'' if labels is None else f'-{len(labels)}'}-v{CACHE_FORMAT}"
    return Source(name, entry, partial(_read_own, dataset, parts, image, label, labels), notice)


def _read_own(
    dataset: str, parts: dict[str, Any], image: str, label: str, labels: Sequence[Any] | None
) -> dict[str, np.ndarray]:
    import datasets

    columns: dict[str, np.ndarray] = {}
    kind = parts["train"].features[label]
    classes = list(kind.names) if isinstance(kind, datasets.ClassLabel) else sorted(set(parts["train"][label]))
    if labels is not None:
        classes = [*labels]
    elif not isinstance(kind, datasets.ClassLabel) and classes and isinstance(classes[0], int):
        classes = list(range(max(classes) + 1))
    for split, rows in parts.items():
        where = f"dataset={dataset!r}: the {split} split"
        images = list(decode_images(rows.cast_column(image, datasets.Image(decode=False))[image], where))
        if any(pixels.ndim == 3 for pixels in images):
            images = [pixels if pixels.ndim == 3 else np.stack([pixels] * 3) for pixels in images]
        wanted = columns["train_input"].shape[1:] if columns else images[0].shape
        for row, pixels in enumerate(images):
            if pixels.shape != wanted:
                raise UserError(
                    f"{where} has an image of shape {pixels.shape} in row {row} where others are {wanted}: "
                    "scale all images to one size, and give all of them colours or none."
                )
        targets = rows[label]
        if not isinstance(kind, datasets.ClassLabel):
            places = {name: place for place, name in enumerate(classes)}
            targets = [places.get(name, -1) for name in targets]
        for row, place in enumerate(targets):
            if place is None or place < 0:
                raise UserError(f"{where} has the label {rows[label][row]!r} in row {row}, which no training row has.")
        columns |= {f"{split}_input": np.stack(images), f"{split}_label": np.array(targets, dtype=np.int64)}
    return _with_facts(columns, map(str, classes))


def _with_facts(columns: dict[str, np.ndarray], classes: Iterable[str]) -> dict[str, np.ndarray]:
    """`columns`, with mean and deviation of the training pixels, and the names of the classes."""
    mean_std = _mean_std(columns["train_input"])
    if not mean_std[1]:
        raise UserError("all pixels of the training images have one value: there is nothing to learn from them.")
    return columns | {"pixel_mean_std": mean_std, "classes": words_column([*classes])}


def read_digits() -> dict[str, np.ndarray]:
    """scikit-learn's 1,797 handwritten digits (8x8, 17 grey levels), as columns.

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
