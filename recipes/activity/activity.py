"""Windows of motion sensors with the activity that they show, some volunteers held out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

import toolkit as tk
from activity.activity_sources import (
    HMP_RATE_HZ,
    PARTS,
    UCI_HAR_RATE_HZ,
    UCI_HAR_STEPS,
    Name,
    Recordings,
    Windows,
    cut,
    find_own,
    generate_trials,
    locate,
)

MADE_UP = "made-up volunteers say nothing about people."
CACHE_FORMAT = 3
"""Version of the cached content."""


@dataclass(frozen=True)
class ActivityData:
    """Two tables with the columns "input" (N, channels, readings) float32 and "label" (N,) int64."""

    name: str
    """hmp, uci_har, generated, or the name of your own set."""
    train: tk.TensorTable
    test: tk.TensorTable
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
    """A sentence for the user, when this is not a set of people, or how your own was read."""
    validation: tk.TensorTable | None = None
    """Windows of further volunteers who are not trained on, for choices."""

    @property
    def num_channels(self) -> int:
        return len(self.mean)

    def facts(self) -> dict[str, Any]:
        """Return the data's entries in results.json."""
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


def load_activity(
    dataset: str,
    data_dir: Path | None,
    *,
    on_main: tk.data.OnMain,
    window_seconds: float | None = None,
    overlap: float = 0.5,
    fold: int | None = None,
    folds: int = 5,
    rate_hz: float | None = None,
    validation: bool = False,
) -> ActivityData:
    """Load windows of sensor signals.

    Args:
        dataset: "hmp", "uci_har", "generated", or "auto" for the first that is available; or a file, a folder or
            "owner/name" of the Hub with columns for subject, activity and signals, see `find_own`.
        data_dir: The folder of a named set, or one above it; None looks in $TOOLKIT_DATA_DIR and on the Hub.
        on_main: `Run.on_main_and_share`.
        window_seconds: Length of a window; None means 4, or the publisher's windows.
        overlap: Fraction of a window that the next one shares.
        fold: Which of `folds` parts of the volunteers is the test data. Default: the official splits, or fold 0
            without official splits.
        folds: Parts into which volunteers are divided.
        rate_hz: Readings per second of a set of your own.
        validation: Hold out a part of the training volunteers, too; an official validation split always is.

    Returns:
        Its tables, and the facts that a model needs.

    Raises:
        UserError: On every rank, the set is missing or invalid.
    """
    name, notice, columns = tk.data.shared_columns(
        dataset, lambda: _find(dataset, data_dir, window_seconds, overlap, rate_hz), on_main
    )
    classes = tk.data.words_of(columns["classes"])
    volunteers = tk.data.words_of(columns["volunteers"])
    volunteer = columns["volunteer"]
    part = columns["part"] if fold is None else torch.zeros_like(volunteer)
    held_out, chosen_on = _held_out(volunteer, part, fold, folds)
    if validation and not chosen_on.any():
        rest = volunteer[~held_out[volunteer]]
        others = len(rest.unique())
        tk.require(others > 1, "validation", True, "there is one volunteer to train on: leave it out")
        chosen_on = _fold(rest, 0, min(folds, others), len(held_out))
    parts = {"train": ~(held_out | chosen_on), "test": held_out, "validation": chosen_on}
    tables = {
        part: tk.TensorTable(input=columns["signal"][who[volunteer]], label=columns["label"][who[volunteer]])
        for part, who in parts.items()
    }
    unknown = ~torch.isin(tables["test"].columns["label"], tables["train"].columns["label"])
    if tk.data.is_own(dataset) and unknown.any():
        activity = classes[tables["test"].columns["label"][unknown][0]]
        raise tk.UserError(f"dataset={dataset!r}: no training window has the activity {activity!r} of a test window.")
    std, mean = torch.std_mean(tables["train"].columns["input"], dim=(0, 2))
    return ActivityData(
        name=name,
        train=tables["train"],
        test=tables["test"],
        classes=classes,
        held_out=tuple(volunteers[i] for i in held_out.nonzero()[:, 0].tolist()),
        rate_hz=columns["rate_hz"].item(),
        mean=mean,
        std=std.clamp_min(1e-6),
        class_counts=torch.bincount(tables["train"].columns["label"], minlength=len(classes)),
        notice=notice,
        validation=tables["validation"] if validation else None,
    )


def _held_out(volunteer: Tensor, part: Tensor, fold: int | None, folds: int) -> tuple[Tensor, Tensor]:
    """Return the test and the validation volunteers, (volunteers,) bool, by official splits or folds."""
    count = int(volunteer.max()) + 1
    test, validation = (
        volunteer[part == PARTS.index(which)].bincount(minlength=count) > 0 for which in ("test", "validation")
    )
    if test.any():
        everybody = "everybody is in the test split or that for validation: give fold=0"
        tk.require(not (test | validation).all(), "fold", None, everybody)
        return test, validation & ~test
    tk.require(folds <= count, "folds", folds, f"take at most {count}, the number of volunteers")
    return _fold(volunteer, fold or 0, folds, count), validation


def _fold(volunteer: Tensor, fold: int, folds: int, count: int) -> Tensor:
    """Return a mask (count,) of one of `folds` parts, with about equal numbers of windows."""
    from sklearn.model_selection import GroupKFold

    parts = GroupKFold(folds).split(np.empty(len(volunteer)), groups=volunteer.numpy())
    _, test = next(itertools.islice(parts, fold, None))
    return volunteer[torch.from_numpy(test)].bincount(minlength=count) > 0


def _find(
    dataset: str, data_dir: Path | None, window_seconds: float | None, overlap: float, rate_hz: float | None
) -> tk.data.Source:
    seconds = window_seconds or 4.0
    notice = None
    if dataset not in ("auto", *get_args(Name)):
        if not tk.data.is_own(dataset):
            names = ", ".join(("auto", *get_args(Name)))
            raise tk.UserError(
                f"dataset={dataset!r}: there is no such set; choose one of {names}, a file, a folder, or owner/name of "
                "the Hub."
            )
        found = find_own(dataset, rate_hz)
        notice = found.notice
    elif dataset == "generated":
        found = Recordings("generated", "generated", HMP_RATE_HZ, generate_trials)
        notice = MADE_UP.capitalize()
    else:
        wanted = ["hmp", "uci_har"] if dataset == "auto" else [dataset]
        try:
            found = locate(wanted, data_dir)
        except tk.data.NotFoundHere as reason:
            if data_dir is not None:
                raise tk.UserError(
                    f"data_dir={str(data_dir)!r}: {reason}; name the folder of the set, or one above it."
                ) from None
            if dataset != "auto":
                raise tk.UserError(f"dataset={dataset!r}: {reason}; give data_dir, or take generated.") from None
            found = Recordings("generated", "generated", HMP_RATE_HZ, generate_trials)
            notice = f"No hmp (dataset='hmp' says why): {MADE_UP}"
    published = UCI_HAR_STEPS / UCI_HAR_RATE_HZ
    if found.name == "uci_har" and window_seconds not in (None, published):
        raise tk.UserError(f"window_seconds={window_seconds}: UCI-HAR is published in windows of {published} s.")
    steps = round(seconds * found.rate_hz)
    tk.require(steps >= 8, "window_seconds", seconds, f"take at least {8 / found.rate_hz:g}, 8 readings")
    key = f"{found.name}-{found.key}" + ("" if found.name == "uci_har" else f"-{seconds:g}s-{overlap:g}")

    def read() -> dict[str, np.ndarray]:
        recordings = found.read()
        windows = recordings if isinstance(recordings, Windows) else cut(recordings, steps=steps, overlap=overlap)
        return {
            "signal": windows.signal,
            "label": windows.label,
            "volunteer": windows.volunteer,
            "part": windows.part,
            "classes": tk.data.words_column(windows.classes),
            "volunteers": tk.data.words_column(windows.volunteers),
            "rate_hz": np.array([found.rate_hz]),
        }

    return tk.data.Source(found.name, f"activity-{key}-v{CACHE_FORMAT}", read, notice)
