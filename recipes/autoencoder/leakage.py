"""How much of the class of an image can be read from its style, which is meant to hold everything else.

Lower is better for all but `mig`. Information is in units of the entropy of the class, accuracies are rescaled so that
chance is 0 and perfection 1.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray

import toolkit as tk

BINS = 20
BATCH = 1000


class StyleLeakage(tk.Callback):
    """Adds `measure_leakage` of `table` to the results, for a model that returns "style" and "logits".

    Each evaluation of the test data logs it as `leakage/...`.
    """

    state_attributes = ("leakage",)

    def __init__(self, table: tk.TensorTable):
        self.table = table
        self.leakage: dict[str, float] = {}

    @torch.no_grad()
    def on_evaluate_end(self, trainer: tk.Trainer, name: str, metrics: dict[str, float]) -> None:  # noqa: ARG002
        if name != "eval":
            return
        trainer.model.eval()
        trainer.use_weights_for("eval")
        styles, answers = [], []
        for rows in torch.arange(len(self.table)).split(BATCH):
            # All ranks see all images: a forward pass may be a collective.
            images, noise = (self.table[rows][name].to(trainer.run.device) for name in ("input", "noise"))
            out = trainer.model(images, noise, styles=True)
            styles.append(out["style"].float().cpu())
            answers.append(out["logits"].argmax(-1).cpu())
        trainer.model.train()
        trainer.use_weights_for("train")
        labels = self.table.columns["label"].numpy()
        self.leakage = trainer.run.on_main_and_share(
            lambda: measure_leakage(torch.cat(styles).numpy(), torch.cat(answers).numpy(), labels)
        )
        for measure, value in self.leakage.items():
            trainer.record(f"leakage/{measure}", value)

    def on_fit_end(self, trainer: tk.Trainer) -> None:
        trainer.results |= self.leakage


def measure_leakage(
    styles: NDArray[np.floating], answers: NDArray[np.integer], labels: NDArray[np.integer]
) -> dict[str, float]:
    """Measure mean styles (N, S), inferred classes (N,) and true classes (N,).

    mig                 mutual information gap (Chen et al. 2018, NeurIPS, eq. 6) of the one known factor, the class:
                        the inferred class and each style are latent variables, and the best two are compared
    style_information   the most that one style dimension tells of the class
    one_style_probe     accuracy of a logistic regression on one style dimension, the best of them
    all_styles_probe    the same on all dimensions at once
    style_variance      variance of the means of classes over the mean variance within classes, mean over dimensions
    """
    entropy = _entropy(np.bincount(labels))
    of_styles = [mutual_information(_binned(column), labels) / entropy for column in styles.T]
    ranked = sorted([mutual_information(answers, labels) / entropy, *of_styles])
    single = [_probe(column[:, None], labels) for column in styles.T]
    return {
        "mig": ranked[-1] - ranked[-2],
        "style_information": max(of_styles),
        "one_style_probe": max(single),
        "all_styles_probe": _probe(styles, labels),
        "style_variance": variance_ratio(styles, labels),
    }


def mutual_information(a: NDArray[np.integer], b: NDArray[np.integer]) -> float:
    """I(a; b) in nats of two discrete samples (N,), as counted."""
    joint = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(joint, (a, b), 1)
    return _entropy(joint.sum(1)) + _entropy(joint.sum(0)) - _entropy(joint.ravel())


def variance_ratio(styles: NDArray[np.floating], labels: NDArray[np.integer]) -> float:
    """Between over within: 0 if all classes have the same mean style."""
    classes = np.unique(labels)
    means = np.stack([styles[labels == label].mean(0) for label in classes])
    within = np.stack([styles[labels == label].var(0) for label in classes]).mean(0)
    return float((means.var(0) / np.maximum(within, 1e-12)).mean())


def _entropy(counts: NDArray[np.number]) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _binned(values: NDArray[np.floating]) -> NDArray[np.integer]:
    """Bin of each value, of 20 of equal width between the least and the greatest."""
    edges = np.linspace(values.min(), values.max(), BINS + 1)[1:-1]
    return np.digitize(values, edges)


def _probe(features: NDArray[np.floating], labels: NDArray[np.integer]) -> float:
    """Fit on one half of the images, score on the other; never below 0."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    scaled = (features - features.mean(0)) / np.maximum(features.std(0), 1e-12)
    fitted, judged = np.array_split(np.random.default_rng(0).permutation(len(labels)), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a probe that is stopped a little early leaks as much
        probe = LogisticRegression(max_iter=50).fit(scaled[fitted], labels[fitted])
    chance = np.bincount(labels[judged]).max() / len(judged)
    return max(0.0, float((probe.score(scaled[judged], labels[judged]) - chance) / (1 - chance)))
