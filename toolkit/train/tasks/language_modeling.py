"""Predicting the next token of `batch["tokens"]` (B, T + 1)."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from toolkit.data.table import Batch
from toolkit.data.text import IGNORED, input_ids
from toolkit.experts.compat import without_compile_prefix
from toolkit.train.task import Loss

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer

    from toolkit.experts.layer.losses import RouterPenalty

LOGITS_AT_ONCE = 2**26
"""Maximum number of logits in a chunk of the loss: 256 MiB in float32."""
HEAD_IS_LAST = re.compile(r"logits = self\.lm_head\([^()]*\)\s+loss = None")
"""Source of a transformers model that neither scales nor caps its logits."""


class LanguageModeling:
    """Cross-entropy in nats per token, and in bits per byte of the text.

    The model takes `input_ids` (B, T) and returns an object with `logits` (B, T, V), as those of transformers do.
    Tokens below 0 are no targets: `toolkit.data.text.input_ids` says what is read there.

    More than `LOGITS_AT_ONCE` logits are computed in chunks of tokens by the head of a transformers model, in the
    forward pass and again in the backward pass, unless the model is compiled, or scales or caps its logits.

    Args:
        bytes_per_token: Of the held-out text: on average for a tokenizer, 1 for bytes.
        penalty: Router losses to add.
    """

    def __init__(self, *, bytes_per_token: float = 1.0, penalty: RouterPenalty | None = None):
        self.bits_per_nat = 1 / (math.log(2) * bytes_per_token)
        self.penalty = penalty

    def count(self, batch: Batch) -> int | Int[Tensor, ""]:
        counted = targets_of(batch)
        return int(counted) if counted.device.type == "cpu" else counted

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        nats = self._nats(model, batch["tokens"])
        penalty = self.penalty.share() if self.penalty is not None else None
        return Loss(nats, targets_of(batch), penalty)

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        nats = self._nats(model, batch["tokens"])
        return Loss(nats, targets_of(batch), sums={"bits_per_byte": nats * self.bits_per_nat})

    def _nats(self, model: nn.Module, tokens: Integer[Tensor, "B S"]) -> Float[Tensor, ""]:
        """Summed over all targets."""
        if not len(tokens):
            return self._nothing(model, tokens.new_zeros(1, 1, dtype=torch.int64))
        tokens = tokens.long()
        ids, targets = input_ids(tokens[:, :-1]), tokens[:, 1:].clamp(min=IGNORED).flatten()
        head = _last_head(model)
        rows = len(targets) if head is None else max(1, LOGITS_AT_ONCE // len(head.weight))
        if len(targets) <= rows:
            return _cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets)
        with _chunked_loss(head, targets.split(rows)):
            return model(input_ids=ids).logits.sum()

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


def _cross_entropy(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> Float[Tensor, ""]:
    return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORED)


@contextmanager
def _chunked_loss(head: Any, targets: Sequence[Tensor]) -> Iterator[None]:
    """Return a context in which `head` returns the loss of each chunk of tokens instead of logits.

    Inside the model's forward pass, because FSDP2 gathers the weights of the head there only.
    """
    compute = head.forward

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(compute(hidden), targets)

    def losses(hidden: Tensor) -> Tensor:
        chunks = zip(hidden.flatten(0, 1).split(len(targets[0])), targets, strict=True)
        return torch.stack([checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks])

    head.forward = losses
    try:
        yield
    finally:
        head.forward = compute


def _last_head(model: nn.Module) -> Any:
    """Return the head of a transformers model if its outputs are the model's logits, else None."""
    for name, module in model.named_modules():
        if hasattr(type(module), "get_output_embeddings"):
            is_last = without_compile_prefix(name) == name and _is_last(type(module).forward)
            return module.get_output_embeddings() if is_last else None
    return None


@functools.cache
def _is_last(forward: Callable[..., Any]) -> bool:
    return HEAD_IS_LAST.search(inspect.getsource(forward)) is not None
