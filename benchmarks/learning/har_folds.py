"""Activity recognition by a wrist accelerometer, 5 folds of held-out volunteers: five networks and three baselines.

    python benchmarks/learning/har_folds.py --data-dir DIR               3 seeds, an hour or more on one CPU thread
    python benchmarks/learning/har_folds.py --data-dir DIR --seeds       only report finished runs

All methods use the same windows of 4 s. The networks are presets of `recipes/har.py`. The baselines are the most
frequent activity, and the nearest class centroid and a random forest on hand-made features. Runs are kept in --work and
not repeated. Writes benchmarks/results/har_folds.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import accuracy_score, f1_score
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from activity.activity import load_activity
from benchmarks.report import write_report
from recipes import har

FOLDS = 5
MODES = {
    "all_channels": har.full,
    "flatten": har.flatten,
    "flatten, 12 epochs": lambda: har.flatten().replace(epochs=12),  # as in the other modes
    "average": har.average,
    "first": har.first,
}
Scores = list[tuple[float, float]]
"""Accuracy and macro-F1 of each fold."""


def features(windows: np.ndarray) -> np.ndarray:
    """Return features (N, F) of windows (N, 3, T): moments, quartiles, jerk and spectrum up to 4 Hz of each axis, and
    correlations of the axes.
    """
    centred = windows - windows.mean(-1, keepdims=True)
    deviation = windows.std(-1) + 1e-6
    spectrum = np.abs(np.fft.rfft(centred))[..., 1:17]
    scaled = centred / deviation[..., None]
    correlations = [(scaled[:, i] * scaled[:, j]).mean(-1) for i, j in ((0, 1), (0, 2), (1, 2))]
    quantiles = np.quantile(windows, (0, 0.25, 0.5, 0.75, 1), axis=-1)
    jerk = np.abs(np.diff(windows)).mean(-1)
    parts = [
        windows.mean(-1),
        deviation,
        jerk,
        *quantiles,
        spectrum.reshape(len(windows), -1),
        np.stack(correlations, 1),
    ]
    return np.concatenate(parts, axis=1)


def baselines(data_dir: Path | None, seeds: Sequence[int]) -> dict[str, dict[int, Scores]]:
    """Return scores of each baseline by seed; only the forest is random."""
    frequent, centroid = "most frequent activity", "nearest centroid, hand-made features"
    forest = "random forest, hand-made features"
    scores: dict[str, dict[int, Scores]] = {frequent: {0: []}, centroid: {0: []}, forest: {seed: [] for seed in seeds}}
    for fold in range(FOLDS):
        data = load_activity("hmp", data_dir, on_main=lambda decide: decide(), fold=fold, folds=FOLDS)
        train, test = data.train.columns, data.test.columns
        x, test_x = features(train["input"].numpy()), features(test["input"].numpy())
        models: list[tuple[Scores, Any]] = [
            (scores[frequent][0], DummyClassifier()),
            (scores[centroid][0], make_pipeline(StandardScaler(), NearestCentroid())),
            *((scores[forest][seed], RandomForestClassifier(300, random_state=seed)) for seed in seeds),
        ]
        for by_fold, model in models:
            answers, truth = model.fit(x, train["label"].numpy()).predict(test_x), test["label"].numpy()
            by_fold.append((accuracy_score(truth, answers), f1_score(truth, answers, average="macro")))
    return scores


def train(mode: str, seed: int, fold: int, data_dir: Path | None, work: Path) -> None:
    """Train unless the run is finished."""
    folder = work / f"{folder_name(mode)}-fold{fold}-seed{seed}"
    if not (folder / "results.json").exists():
        config = MODES[mode]().replace(dataset="hmp", data_dir=data_dir, fold=fold, folds=FOLDS, seed=seed)
        har.main(config.replace(tracker="none", cpu=True, run_dir=folder))


def folder_name(mode: str) -> str:
    return mode.replace(", ", "-").replace(" ", "-")


def finished(mode: str, work: Path) -> dict[int, Scores]:
    """Return scores by seed, for seeds with all folds finished."""
    scores: dict[int, Scores] = {}
    for path in sorted(work.glob(f"{folder_name(mode)}-fold*-seed*/results.json")):
        numbers = json.loads(path.read_text())
        scores.setdefault(numbers["seed"], []).append((numbers["test_accuracy"], numbers["test_macro_f1"]))
    return {seed: by_fold for seed, by_fold in sorted(scores.items()) if len(by_fold) == FOLDS}


def row(method: str, by_seed: Mapping[int, Scores]) -> dict[str, object]:
    """Return means over folds and seeds, and standard deviations over folds and over seeds."""
    table = 100 * np.array(list(by_seed.values()))  # (seeds, folds, 2)
    accuracy, f1 = table.mean((0, 1)).round(1).tolist()
    return {
        "method": method,
        "accuracy %": accuracy,
        "macro-F1 %": f1,
        "sd over folds": table.mean(0).std(0, ddof=1).round(1).tolist(),
        "sd over seeds": table.mean(1).std(0, ddof=1).round(1).tolist() if len(table) > 1 else None,
        "accuracy of each fold": table.mean(0)[:, 0].round(1).tolist(),
        "macro-F1 of each fold": table.mean(0)[:, 1].round(1).tolist(),
        "seeds": list(by_seed),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with hmp/. Default: $TOOLKIT_DATA_DIR")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="settings were tuned with seed 0")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--only-folds", type=int, nargs="+", default=range(FOLDS), help="folds to train")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "har_folds", help="folder of the runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for mode, seed, fold in itertools.product(args.modes, args.seeds, args.only_folds):
        train(mode, seed, fold, args.data_dir, args.work)
    trained = {mode: by_seed for mode in MODES if (by_seed := finished(mode, args.work))}
    measured = trained | baselines(args.data_dir, [1, 2, 3])
    write_report("har_folds", [row(method, by_seed) for method, by_seed in measured.items()], window_seconds=4.0)
