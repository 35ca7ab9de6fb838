"""Predicting the next token of `batch["tokens"]` (B, T + 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.data.table import Batch
from toolkit.data.text import IGNORED, input_ids
from toolkit.train.task import Loss

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer


class LanguageModeling:
    """Cross-entropy in nats per token, and in bits per byte of the text.

    The model takes `input_ids` (B, T) and returns an object with `logits` (B, T, V), as those of transformers do.
    Tokens below 0 are no targets: `toolkit.data.text.input_ids` says what is read there.

    Args:
        bytes_per_token: Of the held-out text: on average for a tokenizer, 1 for bytes.
        penalty: Called after each training forward pass; returns a term to add.
    """

    def __init__(self, *, bytes_per_token: float = 1.0, penalty: Callable[[], Tensor | None] | None = None):
        self.bits_per_nat = 1 / (math.log(2) * bytes_per_token)
        self.penalty = penalty

    def count(self, batch: Batch) -> int | Int[Tensor, ""]:
        counted = targets_of(batch)
        return int(counted) if counted.device.type == "cpu" else counted

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        nats = self._nats(model, batch["tokens"])
        penalty = self.penalty() if self.penalty is not None else None
        return Loss(nats, targets_of(batch), penalty)

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        nats = self._nats(model, batch["tokens"])
        return Loss(nats, targets_of(batch), sums={"bits_per_byte": nats * self.bits_per_nat})

    def _nats(self, model: nn.Module, tokens: Integer[Tensor, "B S"]) -> Float[Tensor, ""]:
        """Summed over all targets."""
        if not len(tokens):
            return self._nothing(model, tokens.new_zeros(1, 1, dtype=torch.int64))
        tokens = tokens.long()
        logits = model(input_ids=input_ids(tokens[:, :-1])).logits
        targets = tokens[:, 1:].clamp(min=IGNORED).flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum", ignore_index=IGNORED)

    def _nothing(self, model: nn.Module, token: Int[Tensor, "1 1"]) -> Float[Tensor, ""]:
        """Zero, after a forward of one token that does not count: transformers' attention takes no empty batch, and
        with expert parallelism the other ranks wait for this one."""
        was_training = model.training
        model.eval()
        nothing = model(input_ids=token).logits.sum() * 0
        model.train(was_training)
        return nothing


def targets_of(batch: Batch) -> Int[Tensor, ""]:
    """Number of targets of a batch, as a tensor: `expected_memory` computes the loss without values."""
    return (batch["tokens"][:, 1:] >= 0).sum()
