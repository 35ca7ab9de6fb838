"""The reference's objective, for comparison with `SemiSupervised`."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from toolkit.train.task import Batch, Loss
from toolkit.train.tasks.classification import correct


class RelaxedBound:
    """The bound of `autoencoder.RelaxedVAE`.

    A known class adds 1 + `supervision_weight` times its log probability. (After Narayanaswamy et al. 2017, NeurIPS,
    with one weight.) With the class given, all samples weigh the same. Labels are those of the batch, -1 where there is
    none. An image's answer is the best class in the weighted mean of its samples, as the study has it; `logit_accuracy`
    asks the logits.
    """

    def __init__(self, supervision_weight: float):
        self.supervision_weight = supervision_weight

    def count(self, batch: Batch) -> int:
        return len(batch["input"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        label = batch["label"]
        out = model(batch["input"], batch["noise"], label=label)
        elbo = out["log_weight"].mean(-1)
        known = F.cross_entropy(out["logits"], label, ignore_index=-1, reduction="sum")
        return Loss((1 + self.supervision_weight) * known - elbo.sum(), len(label), sums={"elbo": elbo.sum()})

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        out = model(batch["input"], batch["noise"])
        label = batch["label"]
        hits = {"accuracy": correct(out["mean_class"], label), "logit_accuracy": correct(out["logits"], label)}
        return Loss(-out["log_weight"].mean(-1).sum(), len(label), sums=hits)
