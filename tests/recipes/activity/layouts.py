"""Tiny sets of recordings in the layouts that real ones are published in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from activity.activity_sources import UCI_HAR_SIGNALS

UCI_SUBJECTS = {"train": [1, 1, 3, 3, 3, 6], "test": [2, 2, 4]}
UCI_LABELS = {"train": [1, 2, 3, 4, 5, 6], "test": [6, 1, 2]}


def uci_signal(split: str) -> np.ndarray:
    """(windows, 9, 128) numbers that the files of `split` hold exactly."""
    shape = (len(UCI_LABELS[split]), len(UCI_HAR_SIGNALS), 128)
    return np.random.default_rng(len(split)).integers(-1000, 1000, shape).astype(np.float32) / 16


def write_uci_har(folder: Path) -> Path:
    """Both splits as published: a text file per signal, a row per window."""
    for split in UCI_LABELS:
        signals = folder / split / "Inertial Signals"
        signals.mkdir(parents=True)
        for channel, name in enumerate(UCI_HAR_SIGNALS):
            np.savetxt(signals / f"{name}_{split}.txt", uci_signal(split)[:, channel], fmt=" %.7e")
        (folder / split / f"y_{split}.txt").write_text("".join(f"{label}\n" for label in UCI_LABELS[split]))
        (folder / split / f"subject_{split}.txt").write_text("".join(f"{s}\n" for s in UCI_SUBJECTS[split]))
    return folder


def write_hmp(folder: Path, trials: list[tuple[str, str, np.ndarray]]) -> Path:
    """Trials of (activity, volunteer, codes (3, readings)) as rows of a Parquet file."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "activity": [activity for activity, _, _ in trials],
        "volunteer": [volunteer for _, volunteer, _ in trials],
        "recorded_at": ["2011-04-11-13-28-18"] * len(trials),
        **{axis: [codes[i].tolist() for _, _, codes in trials] for i, axis in enumerate("xyz")},
    }
    pa.parquet.write_table(pa.table(columns), folder / "train-00000-of-00001.parquet")
    return folder


def codes(readings: int, start: int = 0) -> np.ndarray:
    """(3, readings) codes from 0 to 63 that count up, differently on each axis."""
    return (np.arange(readings) * np.array([[1], [2], [3]]) + start) % 64
