"""Recordings of motion sensors: finding and reading them, and synthetic ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

import toolkit as tk

Name = Literal["hmp", "uci_har", "generated"]
PARTS = ("train", "test", "validation")
"""Splits that a publisher can assign."""

UCI_HAR_REPO = "udayl/UCI_HAR"
UCI_HAR_SIGNALS = tuple(
    f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in ("x", "y", "z")
)
"""Accelerations in g (without and with gravity) and angular velocities in rad/s, from a phone at the waist."""
UCI_HAR_CLASSES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
UCI_HAR_PATTERNS = ("*/Inertial Signals/*.txt", "*/y_*.txt", "*/subject_*.txt")
UCI_HAR_RATE_HZ = 50.0
UCI_HAR_STEPS = 128
"""Readings per window, as published: 2.56 s that overlap by half."""

HMP_RATE_HZ = 32.0
HMP_RANGE_G = 1.5
HMP_CODES = 63
"""A reading is a code from 0 for -1.5 g to 63 for +1.5 g."""

MADE_UP_VOLUNTEERS, MADE_UP_TRIALS, MADE_UP_SECONDS = 10, 2, 16
"""The generated set has so many trials of each activity by each volunteer, and seconds of a trial."""


@dataclass(frozen=True)
class Trial:
    """One volunteer doing one thing for a while."""

    signal: np.ndarray
    """(channels, readings) float32."""
    activity: str
    volunteer: str
    part: str = "train"
    """One of `PARTS`."""


@dataclass(frozen=True)
class Windows:
    """Labelled windows of equal length; the columns of a cache entry, apart from the names."""

    signal: np.ndarray
    """(windows, channels, readings) float32."""
    label: np.ndarray
    """(windows,) int64, indices into `classes`."""
    volunteer: np.ndarray
    """(windows,) int64, indices into `volunteers`."""
    part: np.ndarray
    """(windows,) int64, indices into `PARTS`; zeros if the set has no official split."""
    classes: tuple[str, ...]
    volunteers: tuple[str, ...]


@dataclass(frozen=True)
class Recordings:
    """A set that was found and is not yet read."""

    name: str
    key: str
    """Changes when its content does."""
    rate_hz: float
    read: Callable[[], list[Trial] | Windows]
    notice: str | None = None
    """Message for the user on how it is read."""


# --- locations ---------------------------------------------------------------------------------------------------


def locate(names: Sequence[str], data_dir: Path | None) -> Recordings:
    """Find the first available set of `names`: only in `data_dir`, if given; else in $TOOLKIT_DATA_DIR, and UCI-HAR
    also in the Hub's cache and on the Hub. Raises NotFoundHere naming every place.
    """
    looks: list[Callable[[], Recordings]] = [
        partial(lambda name: find_in_folder(tk.data.data_folder(data_dir), name), name) for name in names
    ]
    if data_dir is None and "uci_har" in names:
        hub = partial(tk.data.find_on_hub, UCI_HAR_REPO, UCI_HAR_PATTERNS, _uci_har_files)
        looks += [partial(hub, ask=False), partial(hub, ask=True)]
    reasons = []
    for look in looks:
        try:
            return look()
        except tk.data.NotFoundHere as reason:
            reasons.append(str(reason))
    raise tk.data.NotFoundHere("; ".join(dict.fromkeys(reasons)))


def find_in_folder(folder: Path, name: str) -> Recordings:
    """Find the files of `name` in `folder`, or in its subfolder that is named after the set.

    Raises NotFoundHere if files are missing.
    """
    if name == "hmp":
        for place in (folder / "hmp", folder):
            if place.name == "hmp" and (paths := tuple(tk.data.all_parts(place.glob("train-*.parquet")))):
                return Recordings("hmp", tk.data.content_key(paths), HMP_RATE_HZ, partial(read_hmp, paths))
        raise tk.data.NotFoundHere(f"{folder} does not hold hmp/train-*.parquet")
    for place in (folder / "UCI HAR Dataset", folder / "uci_har", folder):
        if (place / "train").is_dir():
            return _uci_har_files(place)
    raise tk.data.NotFoundHere(f"{folder} does not hold train/Inertial Signals/*.txt of UCI-HAR")


def _uci_har_files(folder: Path) -> Recordings:
    paths = tuple(
        folder / split / part
        for split in tk.data.SPLITS
        for part in (
            f"y_{split}.txt",
            f"subject_{split}.txt",
            *(f"Inertial Signals/{signal}_{split}.txt" for signal in UCI_HAR_SIGNALS),
        )
    )
    if missing := [path for path in paths if not path.is_file()]:
        raise tk.data.NotFoundHere(f"{folder} has no {missing[0].relative_to(folder)}")
    return Recordings("uci_har", tk.data.content_key(paths), UCI_HAR_RATE_HZ, partial(read_uci_har, folder))


# --- reading -----------------------------------------------------------------------------------------------------


SUBJECT = ("subject", "volunteer", "participant", "user")
ACTIVITY = ("activity", "label")
TRIAL, NO_SIGNALS = "trial", ("time", "timestamp", "index", "Unnamed: 0")
"""Column names of your own data; the last is pandas' name for the row numbers that it writes."""


def find_own(dataset: str, rate_hz: float | None) -> Recordings:
    """Find trials of your own: a file, a folder or a data set of the Hub, read by `datasets`.

    A row is a reading, and consecutive rows with the same subject, activity and `trial` (if there is such a column) are
    one trial; or a row is a trial, and its signals are lists. Subject and activity columns are named as in `SUBJECT`
    and `ACTIVITY`; all other numeric columns are signals, except `NO_SIGNALS`.

    Args:
        dataset: Argument of `load_splits`; the subjects in its splits `test` and `validation` are held out. Without a
            test split, `validation` is the test split.
        rate_hz: Readings per second.

    Raises:
        UserError: It cannot be loaded, lacks a column, or `rate_hz` is None.
    """
    tk.require(rate_hz is not None, "rate_hz", rate_hz, f"say how many readings per second {dataset} has")
    assert rate_hz is not None
    splits, key = tk.data.load_splits(dataset)
    first = next(iter(splits.values()))
    subject = tk.data.find_column(dataset, first, "subject", SUBJECT)
    activity = tk.data.find_column(dataset, first, "activity", ACTIVITY)
    known = (subject, activity, TRIAL, *NO_SIGNALS)
    others = {name: kind for name, kind in first.features.items() if name not in known}
    signals = [name for name, kind in others.items() if _is_number(kind)]
    for name in (name for name, kind in others.items() if getattr(kind, "dtype", "").endswith("string")):
        _check_text(dataset, name, first[name])
    if not signals:
        raise tk.UserError(f"dataset={dataset!r}: no column of {', '.join(first.column_names)} is a signal, a number.")
    name = Path(dataset).name if Path(dataset).exists() else dataset
    notice = f"{name} has the signals {', '.join(signals)} at {rate_hz:g} Hz."
    read = partial(_own_trials, dataset, splits, subject, activity, signals)
    return Recordings(name, f"{key}-{rate_hz:g}", rate_hz, read, notice)


def _check_text(dataset: str, name: str, cells: Sequence[str | None]) -> None:
    """Raise UserError for a column of numbers that is text because of a few cells, and would be no signal."""
    texts = []
    for row, cell in enumerate(cells):
        try:
            float(cell or "nan")
        except ValueError:
            texts.append(row)
    if 0 < len(texts) < len(cells) / 2:
        raise tk.UserError(
            f"dataset={dataset!r}: row {texts[0]} of {name} is no number: {cells[texts[0]]!r}. Correct it."
        )


def _is_number(kind: Any) -> bool:
    kind = getattr(kind, "feature", kind)  # of a list
    return getattr(kind, "dtype", "").startswith(("int", "uint", "float", "double"))


def _own_trials(dataset: str, splits: Any, subject: str, activity: str, signals: Sequence[str]) -> list[Trial]:
    trials = []
    for split, rows in splits.items():
        part = "test" if split == "validation" and "test" not in splits else split
        named = rows.features[activity]
        names = named.names if hasattr(named, "names") else None
        table = rows.select_columns([subject, activity, *signals, *([TRIAL] if TRIAL in rows.column_names else [])])
        table = table.to_pandas()
        for row in np.flatnonzero(table.isna().any(axis=1)):
            raise tk.UserError(
                f"dataset={dataset!r}: row {row} of the {split} split lacks a value: fill it or drop it."
            )
        if isinstance(table[signals[0]].iloc[0], np.ndarray):
            pieces = [table.iloc[row : row + 1] for row in range(len(table))]
        else:
            known = [name for name in (subject, activity, TRIAL) if name in table]
            begins = (table[known] != table[known].shift()).any(axis=1).cumsum()
            pieces = [piece for _, piece in table.groupby(begins)]
        for piece in pieces:
            readings = [np.concatenate([np.atleast_1d(value) for value in piece[name]]) for name in signals]
            if len({len(axis) for axis in readings}) > 1 or not all(np.isfinite(axis).all() for axis in readings):
                raise tk.UserError(
                    f"dataset={dataset!r}: row {piece.index[0]} of the {split} split has signals of unequal length or "
                    "readings that are not finite: mend or drop it."
                )
            done = piece[activity].iloc[0]
            trials.append(
                Trial(
                    np.stack(readings).astype(np.float32),
                    str(done if names is None else names[done]),
                    str(piece[subject].iloc[0]),
                    part if part in PARTS else "train",
                )
            )
    return trials


def read_uci_har(folder: Path) -> Windows:
    """Read the raw signals of both splits, in the publisher's layout: a window of 128 readings per row.

    Raises UserError for a file that is damaged or cannot be read.
    """
    signals, labels, subjects, parts = [], [], [], []
    for split in tk.data.SPLITS:
        label, subject = (_read_table(folder / split / f"{part}_{split}.txt", 1)[:, 0] for part in ("y", "subject"))
        tables = []
        for name in UCI_HAR_SIGNALS:
            path = folder / split / "Inertial Signals" / f"{name}_{split}.txt"
            tables.append(_read_table(path, UCI_HAR_STEPS))
            if not len(tables[-1]) == len(label) == len(subject):
                raise tk.data.damaged(
                    path, f"has {len(tables[-1])} rows for {len(label)} labels and {len(subject)} subjects"
                )
        for row in np.flatnonzero(~np.isin(label, range(1, len(UCI_HAR_CLASSES) + 1))):
            path = folder / split / f"y_{split}.txt"
            raise tk.data.damaged(path, f"holds the label {label[row]:g} in row {row}, which is not from 1 to 6")
        signals.append(np.stack(tables, axis=1))
        labels.append(label.astype(np.int64) - 1)
        subjects.append(subject.astype(np.int64))
        parts.append(np.full(len(label), PARTS.index(split)))
    numbers, volunteer = np.unique(np.concatenate(subjects), return_inverse=True)
    return Windows(
        signal=np.concatenate(signals),
        label=np.concatenate(labels),
        volunteer=volunteer.astype(np.int64),
        part=np.concatenate(parts),
        classes=UCI_HAR_CLASSES,
        volunteers=tuple(str(number) for number in numbers),
    )


def _read_table(path: Path, columns: int) -> np.ndarray:
    """(rows, columns) float32 from numbers with spaces between."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of an empty file, which raises below
            table = np.loadtxt(path, dtype=np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        raise tk.data.damaged(path, f"cannot be read as rows of numbers ({error})") from None
    if not table.size:
        raise tk.data.damaged(path, "has no rows")
    if table.shape[1] != columns:
        raise tk.data.damaged(path, f"has {table.shape[1]} numbers in a row instead of {columns}")
    for row in np.flatnonzero(~np.isfinite(table).all(1)):
        raise tk.data.damaged(path, f"has a number that is not finite in row {row}")
    return table


def read_hmp(paths: Iterable[Path]) -> list[Trial]:
    """Read trials of the wrist accelerometer set (Bruno et al. 2013), in g.

    Raises UserError for a file that is damaged or cannot be read.
    """
    trials = []
    for path in paths:
        columns = tk.data.read_columns(path, ("activity", "volunteer", "x", "y", "z"))
        for row, (activity, volunteer, *axes) in enumerate(zip(*columns.values(), strict=True)):
            if None in (activity, volunteer) or None in axes:
                raise tk.data.damaged(path, f"has a null in row {row}")
            lengths = {len(axis) for axis in axes}
            if len(lengths) != 1 or 0 in lengths:
                raise tk.data.damaged(path, f"has axes of {sorted(lengths)} readings in row {row}")
            codes = np.array(axes, dtype=np.float64)  # in which a null is not a number
            if not np.isin(codes, range(HMP_CODES + 1)).all():
                raise tk.data.damaged(path, f"has a reading that is not an integer from 0 to {HMP_CODES} in row {row}")
            signal = (codes * (2 * HMP_RANGE_G / HMP_CODES) - HMP_RANGE_G).astype(np.float32)
            trials.append(Trial(signal, str(activity), str(volunteer)))
    return trials


def cut(trials: Iterable[Trial], *, steps: int, overlap: float) -> Windows:
    """Cut each trial to windows of `steps` readings that begin every `steps * (1 - overlap)`. A shorter trial is one
    window, with its last reading repeated.
    """
    trials = list(trials)
    classes = tuple(sorted({trial.activity for trial in trials}))
    volunteers = tuple(sorted({trial.volunteer for trial in trials}))
    stride = max(1, round(steps * (1 - overlap)))
    pieces, labels, owners, parts = [], [], [], []
    for trial in trials:
        short = max(0, steps - trial.signal.shape[1])
        signal = np.pad(trial.signal, ((0, 0), (0, short)), mode="edge")
        views = np.lib.stride_tricks.sliding_window_view(signal, steps, axis=1)[:, ::stride].swapaxes(0, 1)
        pieces.append(views)
        labels += [classes.index(trial.activity)] * len(views)
        owners += [volunteers.index(trial.volunteer)] * len(views)
        parts += [PARTS.index(trial.part)] * len(views)
    return Windows(
        signal=np.concatenate(pieces),
        label=np.array(labels, dtype=np.int64),
        volunteer=np.array(owners, dtype=np.int64),
        part=np.array(parts, dtype=np.int64),
        classes=classes,
        volunteers=volunteers,
    )


def generate_trials() -> list[Trial]:
    """Generate fixed wrist signals: each activity is gravity from one side and a movement of one frequency and
    direction; volunteers differ in speed, strength and tilt.
    """
    random = np.random.default_rng(2013)
    frequencies = {"stir": 0.7, "walk": 1.9, "run": 2.9, "wave": 1.2, "rest": 0.0, "brush": 4.0}
    gravities = random.normal(size=(len(frequencies), 3))
    directions = random.normal(size=(len(frequencies), 3))
    time = np.arange(MADE_UP_SECONDS * HMP_RATE_HZ) / HMP_RATE_HZ
    made = []
    for volunteer in range(MADE_UP_VOLUNTEERS):
        pace = random.uniform(0.85, 1.15)
        strength = random.uniform(0.7, 1.3)
        tilt = random.normal(scale=0.4, size=3)
        for activity, frequency in enumerate(frequencies.values()):
            for _ in range(MADE_UP_TRIALS):
                gravity = gravities[activity] + tilt + random.normal(scale=0.2, size=3)
                phase = 2 * np.pi * (frequency * pace * time + random.uniform())
                movement = 0.4 * strength * (np.sin(phase) + 0.4 * np.sin(2 * phase)) * (frequency > 0)
                signal = gravity[:, None] / np.linalg.norm(gravity) + directions[activity][:, None] * movement
                signal = np.clip(signal + random.normal(scale=0.15, size=signal.shape), -HMP_RANGE_G, HMP_RANGE_G)
                made.append(Trial(signal.astype(np.float32), list(frequencies)[activity], f"made-up-{volunteer:02d}"))
    return made
