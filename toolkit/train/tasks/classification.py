"""Classification of a batch into `batch["label"]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.data.table import Batch
from toolkit.errors import UserError
from toolkit.train.task import Loss

IGNORED = -100
"""A label that torch's cross-entropy leaves out."""


class Classification:
    """Cross-entropy in nats and accuracy, as means over the labels other than `IGNORED`.

    The model gets the columns `inputs` of the batch. `penalty` is called after each training forward and returns a term
    to add, such as `toolkit.experts.layer.losses.RouterPenalty`; `label_smoothing` applies to training only.
    """

    def __init__(
        self,
        *,
        penalty: Callable[[], Tensor | None] | None = None,
        label_smoothing: float = 0.0,
        inputs: Sequence[str] = ("input",),
    ):
        self.penalty, self.label_smoothing, self.inputs = penalty, label_smoothing, inputs
        self.may_ignore = True
        """Whether a training label may be `IGNORED`: then each micro-batch's labels are counted where they are."""
        self._unchecked: dict[tuple[str, bool], Integer[Tensor, " _"]] = {}
        """By the name of the data set, and whether they are all of its labels."""

    def check_columns(self, batch: Mapping[str, Any]) -> None:
        """Raise UserError unless `batch` has the columns `inputs`, and in `label` (N) one class of each sample."""
        for name in (*self.inputs, "label"):
            if name not in batch:
                raise UserError(
                    f"the data have no column `{name}`, only {', '.join(batch)}: rename one of them, or name what the "
                    "model gets in Classification(inputs=...)."
                )
        labels = batch["label"]
        if not isinstance(labels, Tensor):
            raise UserError(f"the column `label` is a {type(labels).__name__}: give each sample a class, 0 or more.")
        if labels.ndim != 1 or labels.dtype not in (torch.int64, torch.uint8):
            shape = ", ".join(["N", *map(str, labels.shape[1:])])
            raise UserError(
                f"the column `label` is {labels.dtype} of shape ({shape}): give one class per sample, torch.int64 of "
                "shape (N)."
            )

    def expect_batch(self, name: str, batch: Mapping[str, Any]) -> None:
        """`check_columns`, and `expect` of the labels of a global batch of the `name` data, before ranks divide it."""
        self.check_columns(batch)
        if batch["label"].device.type == "cpu":
            self.expect({name: batch["label"]}, whole=False)
        elif name == "training":
            self.may_ignore = True

    def expect(self, labels: Mapping[str, Integer[Tensor, " _"]], *, whole: bool = True) -> None:
        """Have the next forward, which tells the number of classes, raise UserError where `labels`, by the name of
        their data set, have one that is no class; or, if they are those of the `whole` set, only such that are left
        out. Every rank raises it, and a GPU does not wait for it. The labels of "training" tell `may_ignore`, too."""
        self._unchecked |= {(name, whole): column for name, column in labels.items()}
        if "training" in labels:
            self.may_ignore = len(labels["training"]) > 0 and int(labels["training"].min()) < 0

    def count(self, batch: Batch) -> int | Int[Tensor, ""]:
        return counted(batch["label"]) if self.may_ignore else len(batch["label"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits = self._logits(model, batch)
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        penalty = self.penalty() if self.penalty is not None else None
        return Loss(entropy, self.count(batch), penalty, {"accuracy": correct(logits, labels)})

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        logits = self._logits(model, batch)
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum")
        return Loss(entropy, counted(labels), sums={"accuracy": correct(logits, labels)})

    def sample_losses(self, model: nn.Module, batch: Batch) -> Float[Tensor, " N"]:
        """(N): nats, each sample's own."""
        return F.cross_entropy(self._logits(model, batch), batch["label"], reduction="none")

    def _logits(self, model: nn.Module, batch: Batch) -> Float[Tensor, "N C"]:
        logits: Tensor = model(*(batch[name] for name in self.inputs))
        self._check(logits.shape[-1])
        return logits

    def _check(self, classes: int) -> None:
        for (name, whole), labels in self._unchecked.items():
            low, high = labels.aminmax() if len(labels) else (0, 0)
            if low >= 0 and high < classes:  # the usual case, in few operations: a DataLoader comes here in each step
                continue
            if whole and (labels == IGNORED).all():
                raise UserError(
                    f"the {name} data have only labels of {IGNORED}, which the loss leaves out: give some a class."
                )
            wrong = (labels >= classes) | ((labels < 0) & (labels != IGNORED))
            if wrong.any():
                row, place = int(wrong.nonzero()[0]), "the column `label`" if whole else "a batch"
                raise UserError(
                    f"the {name} data have the label {int(labels[row])} in row {row} of {place}: "
                    f"the model has {classes} classes, 0 to {classes - 1}."
                )
        self._unchecked = {}


def counted(labels: Integer[Tensor, " N"]) -> int | Int[Tensor, ""]:
    """How many labels are not `IGNORED`: a tensor where they are on a GPU, so that the host does not wait for it."""
    number = (labels.long() != IGNORED).sum()  # as bytes, 156 would be equal to -100
    return int(number) if labels.device.type == "cpu" else number


def correct(logits: Float[Tensor, "N C"], labels: Integer[Tensor, " N"]) -> Int[Tensor, ""]:
    """How many rows of `logits` have their maximum at the label."""
    return (logits.argmax(-1) == labels).sum()
