"""Classification of a batch into `batch["label"]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.task import Batch, Loss


class Classification:
    """Cross-entropy in nats and accuracy.

    The model gets the columns `inputs` of the batch. `penalty` is called after each training forward and returns a term
    to add, such as `toolkit.moe.losses.RouterPenalty`; `label_smoothing` applies to training only.
    """

    def __init__(
        self,
        *,
        penalty: Callable[[], Tensor | None] | None = None,
        label_smoothing: float = 0.0,
        inputs: Sequence[str] = ("input",),
    ):
        self.penalty, self.label_smoothing, self.inputs = penalty, label_smoothing, inputs

    def count(self, batch: Batch) -> int:
        return len(batch["label"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits = model(*(batch[name] for name in self.inputs))
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        penalty = self.penalty() if self.penalty is not None else None
        return Loss(entropy, len(labels), penalty, {"accuracy": correct(logits, labels)})

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        logits = model(*(batch[name] for name in self.inputs))
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum")
        return Loss(entropy, len(labels), sums={"accuracy": correct(logits, labels)})

    def sample_losses(self, model: nn.Module, batch: Batch) -> Float[Tensor, " N"]:
        """(N): nats, each sample's own."""
        return F.cross_entropy(model(batch["input"]), batch["label"], reduction="none")


def correct(logits: Float[Tensor, "N C"], labels: Integer[Tensor, " N"]) -> Int[Tensor, ""]:
    """How many rows of `logits` have their maximum at the label."""
    return (logits.argmax(-1) == labels).sum()
