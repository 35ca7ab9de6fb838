"""Small datasets of recordings in their published layouts."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from activity.activity_sources import UCI_HAR_SIGNALS

UCI_SUBJECTS = {"train": [1, 1, 3, 3, 3, 6], "test": [2, 2, 4]}
UCI_LABELS = {"train": [1, 2, 3, 4, 5, 6], "test": [6, 1, 2]}


def uci_signal(split):
    """Return signals (windows, 9, 128) that the text files of `split` represent exactly."""
    shape = (len(UCI_LABELS[split]), len(UCI_HAR_SIGNALS), 128)
    return np.random.default_rng(len(split)).integers(-1000, 1000, shape).astype(np.float32) / 16


def write_uci_har(folder):
    """Write both splits: a text file per signal, a row per window."""
    for split in UCI_LABELS:
        signals = folder / split / "Inertial Signals"
        signals.mkdir(parents=True)
        for channel, name in enumerate(UCI_HAR_SIGNALS):
            np.savetxt(signals / f"{name}_{split}.txt", uci_signal(split)[:, channel], fmt=" %.7e")
        (folder / split / f"y_{split}.txt").write_text("".join(f"{label}\n" for label in UCI_LABELS[split]))
        (folder / split / f"subject_{split}.txt").write_text("".join(f"{s}\n" for s in UCI_SUBJECTS[split]))


def write_hmp(folder, trials):
    """Write trials of (activity, volunteer, codes (3, readings)) as rows of a Parquet file in `folder`/hmp."""
    (folder / "hmp").mkdir(exist_ok=True)
    columns = {
        "activity": [activity for activity, _, _ in trials],
        "volunteer": [volunteer for _, volunteer, _ in trials],
        "recorded_at": ["2011-04-11-13-28-18"] * len(trials),
        **{axis: [codes[i].tolist() for _, _, codes in trials] for i, axis in enumerate("xyz")},
    }
    pa.parquet.write_table(pa.table(columns), folder / "hmp" / "train-00000-of-00001.parquet")


def codes(readings, start=0):
    """Return codes (3, readings) from 0 to 63 that count up, at a different rate on each axis."""
    return (np.arange(readings) * np.array([[1], [2], [3]]) + start) % 64
