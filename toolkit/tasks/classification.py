"""Classification of a batch into `batch["label"]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.task import Batch, Loss

IGNORED = -100
"""A label that torch's cross-entropy leaves out."""


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
        self._unchecked: dict[str, Integer[Tensor, " _"]] = {}

    def expect(self, **labels: Integer[Tensor, " _"]) -> None:
        """Have the first forward, which tells the number of classes, raise UserError where `labels`, those of a whole
        data set by its name, have one that is no class. Every rank raises it, and a GPU does not wait for it."""
        self._unchecked |= labels

    def count(self, batch: Batch) -> int:
        return len(batch["label"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits = self._logits(model, batch)
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        penalty = self.penalty() if self.penalty is not None else None
        return Loss(entropy, len(labels), penalty, {"accuracy": correct(logits, labels)})

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        logits = self._logits(model, batch)
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum")
        return Loss(entropy, len(labels), sums={"accuracy": correct(logits, labels)})

    def sample_losses(self, model: nn.Module, batch: Batch) -> Float[Tensor, " N"]:
        """(N): nats, each sample's own."""
        return F.cross_entropy(self._logits(model, batch), batch["label"], reduction="none")

    def _logits(self, model: nn.Module, batch: Batch) -> Float[Tensor, "N C"]:
        logits: Tensor = model(*(batch[name] for name in self.inputs))
        self._check(logits.shape[-1])
        return logits

    def _check(self, classes: int) -> None:
        for name, labels in self._unchecked.items():
            wrong = (labels >= classes) | ((labels < 0) & (labels != IGNORED))
            if wrong.any():
                row = int(wrong.nonzero()[0])
                raise UserError(
                    f"the {name} data have the label {int(labels[row])} in row {row} of the column `label`: "
                    f"the model has {classes} classes, 0 to {classes - 1}."
                )
        self._unchecked = {}


def correct(logits: Float[Tensor, "N C"], labels: Integer[Tensor, " N"]) -> Int[Tensor, ""]:
    """How many rows of `logits` have their maximum at the label."""
    return (logits.argmax(-1) == labels).sum()
