"""Consistency regularization: learning from unlabelled images by predictions stable under perturbations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toolkit as tk
from autoencoder.semi_supervised import LabelledOnly


class ConsistencyRegularization(LabelledOnly):
    """Cross-entropy of labelled images, and unlabelled loss terms whose weight is not 0.

    FixMatch (Sohn et al. 2020, eq. 4), `pseudo_label_weight`: the prediction for `input`, the weak view of an image, is
    the label of `strong`, its other view, if its probability is at least `confidence`. The averaged weights predict it,
    as in a mean teacher (Tarvainen and Valpola 2017); in the paper, the weights themselves.

    Virtual adversarial training (Miyato et al. 2019), `smoothness_weight`: the local divergence at `input`, and
    `entropy_weight` times the entropy of the prediction, as in their VAT+EntMin.

    All sums are divided by the images of the batch; each comes with a labelled one (`paired_input`, `paired_label`).
    """

    def __init__(
        self,
        *,
        pseudo_label_weight: float = 0.0,
        confidence: float = 0.95,
        smoothness_weight: float = 0.0,
        entropy_weight: float = 0.0,
    ):
        super().__init__()
        self.pseudo_label_weight, self.confidence = pseudo_label_weight, confidence
        self.smoothness_weight, self.entropy_weight = smoothness_weight, entropy_weight

    def loss(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        more: dict[str, Tensor] = {}
        if self.pseudo_label_weight:
            with torch.no_grad():
                confidence, answer = model(batch["input"], averaged=True)["logits"].softmax(-1).max(-1)
            more["strong"] = batch["strong"]
        if self.smoothness_weight:
            more["directions"] = batch["direction"]
        out = model(batch["input"], paired=batch["paired_input"], **more)
        total = F.cross_entropy(out["paired_logits"], batch["paired_label"], reduction="sum")
        sums = {"cross_entropy": total}
        if self.pseudo_label_weight:
            confident = confidence >= self.confidence
            own = (F.cross_entropy(out["strong_logits"], answer, reduction="none") * confident).sum()
            sums |= {"pseudo_cross_entropy": own, "confident": confident.sum()}
            total = total + self.pseudo_label_weight * own
        if self.smoothness_weight:
            log_q = out["logits"].log_softmax(-1)
            sums |= {"divergence": out["divergence"].sum(), "entropy": -(log_q.exp() * log_q).sum()}
            total = total + self.smoothness_weight * sums["divergence"] + self.entropy_weight * sums["entropy"]
        return tk.Loss(total, len(batch["input"]), sums=sums)
