"""Learning from images of which few have labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toolkit as tk
from autoencoder.labels import UNLABELLED, correct

if TYPE_CHECKING:
    from jaxtyping import Float, Integer

CONFIDENT = 0.95


class SemiSupervised:
    """The objective of M2 with exact inference (Kingma et al. 2014, eq. 9).

    For `SemiSupervisedVAE`. Each image of a batch gives its bound in nats: of the pair (x, y) if `label` is not -1,
    else of x with all classes weighed by q(y | x). `supervision_weight` scales the cross-entropy of a labelled image
    `paired_input` with `paired_label`, `smoothness_weight` the virtual adversarial smoothness of q(y | x).
    """

    def __init__(self, supervision_weight: float, *, smoothness_weight: float):
        self.supervision_weight, self.smoothness_weight = supervision_weight, smoothness_weight

    def count(self, batch: tk.Batch) -> int:
        return len(batch["input"])

    def loss(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        directions = batch["direction"] if self.smoothness_weight else None
        out = model(batch["input"], batch["noise"], paired=batch["paired_input"], directions=directions)
        elbo = evidence_bound(out["logits"], out["bounds"], batch["label"]).sum()
        entropy = F.cross_entropy(out["paired_logits"], batch["paired_label"], reduction="sum")
        total = self.supervision_weight * entropy - elbo
        sums = {"elbo": elbo, "cross_entropy": entropy}
        if directions is not None:
            sums["divergence"] = out["divergence"].sum()
            total = total + self.smoothness_weight * sums["divergence"]
        return tk.Loss(total, len(batch["input"]), sums=sums)

    def evaluate(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        """Return the negative evidence bound of x, in nats per image; labels are used for accuracy only."""
        out = model(batch["input"], batch["noise"])
        unknown = torch.full_like(batch["label"], UNLABELLED)
        elbo = evidence_bound(out["logits"], out["bounds"], unknown).sum()
        return tk.Loss(-elbo, len(unknown), sums={"accuracy": correct(out["logits"], batch["label"])})


def evidence_bound(
    logits: Float[Tensor, "B C"], bounds: Float[Tensor, "B C"], labels: Integer[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """-U(x) of eq. 7, or -L(x, y) if `labels` (B,) is not -1, in nats: (B,); `logits` and `bounds` are (B, C)."""
    log_q = logits.log_softmax(-1)
    unlabelled = (log_q.exp() * (bounds - log_q)).sum(-1)
    labelled = bounds.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return torch.where(labels == UNLABELLED, unlabelled, labelled)


class LabelledOnly:
    """Control: only the classifier, on labelled images, and with `pseudo_label_weight` on its own predictions.

    A pseudo-label (Lee 2013) is a class with a probability q(y | x) above 0.95.
    """

    def __init__(self, *, pseudo_label_weight: float = 0.0):
        self.pseudo_label_weight = pseudo_label_weight

    def count(self, batch: tk.Batch) -> int:
        return len(batch["input"])

    def loss(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        images = batch["input"] if self.pseudo_label_weight else batch["input"][:0]
        out = model(images, paired=batch["paired_input"])
        entropy = F.cross_entropy(out["paired_logits"], batch["paired_label"], reduction="sum")
        total = entropy
        if self.pseudo_label_weight:
            confidence, answer = out["logits"].detach().softmax(-1).max(-1)
            own = F.cross_entropy(out["logits"], answer, reduction="none")
            total = total + self.pseudo_label_weight * (own * (confidence > CONFIDENT)).sum()
        return tk.Loss(total, len(batch["input"]), sums={"cross_entropy": entropy})

    def evaluate(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        logits = model(batch["input"])["logits"]
        entropy = F.cross_entropy(logits, batch["label"], reduction="sum")
        return tk.Loss(entropy, len(logits), sums={"accuracy": correct(logits, batch["label"])})
