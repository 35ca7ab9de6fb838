"""Classification of `batch["input"]` into `batch["label"]` by a vote over several views of each example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toolkit as tk

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

Balance = Literal["none", "sqrt", "inverse"]


class VotedClassification:
    """Cross-entropy and votes of a model whose logits are (examples, views, classes).

    Trains every view on its example's label. Evaluates examples: the vote is the mean of the views' probabilities, its
    cross-entropy is in nats. Reports accuracy, macro-F1, and the confusion matrix (truth, vote) as shares of all
    examples, from counts summed over ranks.

    `class_weights` (classes,) and `label_smoothing` apply to training only.
    """

    def __init__(self, *, class_weights: Tensor | None = None, label_smoothing: float = 0.0):
        self.class_weights, self.label_smoothing = class_weights, label_smoothing

    def count(self, batch: tk.Batch) -> int:
        return len(batch["label"])

    def loss(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        logits = model(batch["input"])
        labels = batch["label"]
        views = logits.shape[1]
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(logits.device)
        entropy = F.cross_entropy(
            logits.flatten(0, 1),
            labels.repeat_interleave(views),
            weight=None if self.class_weights is None else self.class_weights.to(logits.dtype),
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return tk.Loss(entropy / views, len(labels), sums={"accuracy": (vote(logits).argmax(-1) == labels).sum()})

    def evaluate(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        logits = model(batch["input"])
        labels = batch["label"]
        votes = vote(logits)
        classes = logits.shape[-1]
        choices = votes.argmax(-1)
        table = torch.bincount(labels * classes + choices, minlength=classes**2).view(classes, classes)
        sums = {"accuracy": (choices == labels).sum(), "confusion": table}
        return tk.Loss(F.nll_loss(votes, labels, reduction="sum"), len(labels), sums=sums)

    def summarise(self, means: Mapping[str, Any]) -> dict[str, Any]:
        return {**means, "macro_f1": macro_f1(means["confusion"])}


def vote(logits: Float[Tensor, "B V K"]) -> Float[Tensor, "B K"]:
    """Logarithm of the mean of the views' probabilities: (B, views, K) to (B, K)."""
    return logits.float().log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])


def macro_f1(confusion: list[list[float]]) -> float:
    """Mean F1 score over the classes that occur in the truth (rows) or in the votes (columns), in any unit of counts.

    F1 of a class is 2 TP / (2 TP + FP + FN), so scikit-learn's `f1_score(average="macro")` gives the same.
    """
    table = torch.tensor(confusion, dtype=torch.float64)
    occurrences = table.sum(0) + table.sum(1)
    occurs = occurrences > 0
    return (2 * table.diagonal()[occurs] / occurrences[occurs]).mean().item()


def class_weights(counts: Shaped[Tensor, " K"], balance: Balance) -> Float[Tensor, " K"] | None:
    """(classes,) float32 weights of a loss over examples with `counts` of each class, 1 on average over the examples.

    "inverse" makes every class that occurs count alike, "sqrt" goes half the way, "none" is None.
    """
    if balance == "none":
        return None
    occurs = counts > 0
    weights = counts.clamp_min(1).double() ** (-0.5 if balance == "sqrt" else -1.0) * occurs
    return (weights * counts.sum() / (weights * counts).sum()).float()
