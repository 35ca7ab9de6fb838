"""Windows of motion sensors with the activity that they show, some volunteers held out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from activity.activity_sources import (
    HMP_RATE_HZ,
    UCI_HAR_RATE_HZ,
    UCI_HAR_STEPS,
    ActivityFiles,
    Name,
    locate,
    read_windows,
)
from toolkit.data.cache import cached_columns
from toolkit.data.files import NotFoundHere, content_key
from toolkit.data.images import OnMain
from toolkit.data.table import TensorTable
from toolkit.errors import UserError, require

TITLES = "The wrist accelerometer set hmp and UCI-HAR"
CACHE_FORMAT = 1
"""Goes up when what is cached for the same files changes."""


@dataclass(frozen=True)
class ActivityData:
    """Two tables with the columns "input" (N, channels, readings) float32 and "label" (N,) int64."""

    name: str
    """The name of the set: hmp, uci_har or generated."""
    train: TensorTable
    test: TensorTable
    classes: tuple[str, ...]
    held_out: tuple[str, ...]
    """Volunteers of the test table; none of them is in the training table."""
    rate_hz: float
    mean: Tensor
    """(channels,) of the training windows, in the units of the set."""
    std: Tensor
    class_counts: Tensor
    """(classes,) training windows of each class."""
    notice: str | None = None
    """A sentence for the user, when this is not a set of people."""

    @property
    def num_channels(self) -> int:
        return len(self.mean)

    def facts(self) -> dict[str, Any]:
        """What results.json is to say about the data."""
        counts = dict(zip(self.classes, self.class_counts.tolist(), strict=True))
        return {
            "dataset": self.name,
            "dataset_notice": self.notice,
            "held_out_volunteers": list(self.held_out),
            "train_examples": len(self.train),
            "test_examples": len(self.test),
            "classes": list(self.classes),
            "class_counts": counts,
        }

    def describe(self) -> str:
        """The same in a line."""
        fewest = self.class_counts.min()
        most = self.class_counts.max()
        seconds = self.train.columns["input"].shape[-1] / self.rate_hz
        return (
            f"{len(self.train):,} windows of {seconds:.3g} s to train on, {len(self.test):,} of held-out volunteers "
            f"({', '.join(self.held_out)}), {len(self.classes)} classes of {fewest:,} to {most:,} training windows"
        )


@dataclass(frozen=True)
class _Choice:
    """What the main process found."""

    files: ActivityFiles
    window_seconds: float
    overlap: float
    notice: str | None = None

    def columns(self, data_dir: Path | None) -> dict[str, Tensor]:
        key = f"{self.files.name}-{content_key(self.files.paths)}"
        if self.files.name != "uci_har":
            key = f"{key}-{self.window_seconds:g}s-{self.overlap:g}"
        return cached_columns(f"{key}-v{CACHE_FORMAT}", lambda: self._decode(data_dir))

    def _decode(self, data_dir: Path | None) -> dict[str, np.ndarray]:
        files = self.files
        if not all(path.exists() for path in files.paths):  # another machine than the main process's, with its own copy
            files = locate([files.name], data_dir)
        windows = read_windows(files, self.window_seconds, self.overlap)
        return {
            "signal": windows.signal,
            "label": windows.label,
            "volunteer": windows.volunteer,
            "official_test": windows.official_test,
            "classes": _as_bytes(windows.classes),
            "volunteers": _as_bytes(windows.volunteers),
        }


def load_activity(
    dataset: str,
    data_dir: Path | None,
    *,
    on_main: OnMain,
    window_seconds: float | None = None,
    overlap: float = 0.5,
    fold: int | None = None,
    folds: int = 5,
) -> ActivityData:
    """The set `dataset`: "hmp", "uci_har", "generated", or "auto" for the first of them that can be had.

    Held out are the volunteers of `fold` of `folds`; with None those of the official split, or of fold 0 where there is
    none. `window_seconds` None means 4, or the publisher's windows. Raises UserError on every rank alike.
    """
    columns: dict[str, Tensor] = {}

    def decide() -> _Choice:
        choice = _choose(dataset, data_dir, window_seconds, overlap)
        columns.update(choice.columns(data_dir))
        _held_out(columns, fold, folds)
        return choice

    choice: _Choice = on_main(decide)
    columns = columns or choice.columns(data_dir)
    classes = _as_names(columns["classes"])
    volunteers = _as_names(columns["volunteers"])
    held_out = _held_out(columns, fold, folds)
    is_test = held_out[columns["volunteer"]]
    train, test = (
        TensorTable(input=columns["signal"][rows], label=columns["label"][rows]) for rows in (~is_test, is_test)
    )
    std, mean = torch.std_mean(train.columns["input"], dim=(0, 2))
    return ActivityData(
        name=choice.files.name,
        train=train,
        test=test,
        classes=classes,
        held_out=tuple(volunteers[i] for i in held_out.nonzero()[:, 0].tolist()),
        rate_hz=UCI_HAR_RATE_HZ if choice.files.name == "uci_har" else HMP_RATE_HZ,
        mean=mean,
        std=std.clamp_min(1e-6),
        class_counts=torch.bincount(train.columns["label"], minlength=len(classes)),
        notice=choice.notice,
    )


def _held_out(columns: dict[str, Tensor], fold: int | None, folds: int) -> Tensor:
    """(volunteers,) bool: who is held out. Folds have about the same number of windows."""
    volunteer = columns["volunteer"]
    official = columns["official_test"]
    count = int(volunteer.max()) + 1
    if fold is None and official.any():
        return volunteer[official].bincount(minlength=count) > 0
    require(folds <= count, "folds", folds, f"take at most {count}, the number of volunteers")
    from sklearn.model_selection import GroupKFold

    parts = GroupKFold(folds).split(np.empty(len(volunteer)), groups=volunteer.numpy())
    _, test = next(itertools.islice(parts, fold or 0, None))
    return volunteer[torch.from_numpy(test)].bincount(minlength=count) > 0


def _choose(dataset: str, data_dir: Path | None, window_seconds: float | None, overlap: float) -> _Choice:
    if dataset not in ("auto", *get_args(Name)):
        raise UserError(f"dataset={dataset!r}: there is no such set; choose one of auto, {', '.join(get_args(Name))}.")
    seconds = window_seconds or 4.0
    if dataset == "generated":
        return _generated(seconds, overlap)
    names: list[Name] = ["hmp", "uci_har"] if dataset == "auto" else [dataset]  # type: ignore[list-item]
    try:
        files = locate(names, data_dir)
    except NotFoundHere as reason:
        if data_dir is not None:
            raise UserError(
                f"data_dir={str(data_dir)!r}: {reason}; name the folder of the set, or one above it."
            ) from None
        if dataset != "auto":
            raise UserError(f"dataset={dataset!r}: {reason}; give data_dir, or take generated.") from None
        return _generated(seconds, overlap, f"{TITLES} could not be reached ({reason}); ")
    published = UCI_HAR_STEPS / UCI_HAR_RATE_HZ
    if files.name == "uci_har" and window_seconds not in (None, published):
        raise UserError(f"window_seconds={window_seconds}: UCI-HAR is published in windows of {published} s.")
    return _Choice(files, seconds, overlap)


def _generated(seconds: float, overlap: float, reason: str = "") -> _Choice:
    notice = f"{reason}Training on generated signals: made-up volunteers, whose accuracy says nothing about people."
    return _Choice(ActivityFiles("generated"), seconds, overlap, notice)


def _as_bytes(names: tuple[str, ...]) -> np.ndarray:
    """Names as a column that a cache entry can hold."""
    return np.frombuffer("\n".join(names).encode(), dtype=np.uint8).copy()


def _as_names(column: Tensor) -> tuple[str, ...]:
    return tuple(bytes(column.tolist()).decode().split("\n"))
