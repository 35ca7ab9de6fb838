"""Speech encoders with an output layer: characters for CTC, or one class per utterance.

Letters: B batch, T frames, M mel bands, H width. Batches are padded with zeros; outputs for the frames of an utterance
do not depend on the padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speech.legendre import LegendreMemory
from speech.lmu import LMU

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

States = list[Tensor]


class Standardise(nn.Module):
    """Log-mel features, stored in any type, to zero mean and unit variance per band (over the training set)."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor):
        super().__init__()
        self.register_buffer("mean", mean.float().clone())
        self.register_buffer("std", std.float().clone())

    def forward(self, features: Shaped[Tensor, "*B T M"]) -> Float[Tensor, "*B T M"]:
        return (features.float() - self.mean) / self.std


class MemoryBlock(nn.Module):
    """Two residual branches: C signals are remembered and read by a gated unit; then a feed-forward network."""

    def __init__(self, width: int, *, channels: int, order: int, theta: float, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.write = nn.Linear(width, channels)
        self.memory = LegendreMemory(order, theta)
        self.read = nn.Linear(channels * order + width, 2 * width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B T H"], state: Float[Tensor, "B C D"] | None = None
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B C D"]]:
        """(B, T, H) and the memory (B, C, D) before it; returns both, changed."""
        here = self.norm(x)
        memory, state = self.memory(self.write(here), state)
        x = x + self.dropout(F.glu(self.read(torch.cat([memory.flatten(2).to(here.dtype), here], -1))))
        return x + self.dropout(self.feed_forward(x)), state


class MemoryEncoder(nn.Module):
    """Parallel Legendre memories with residual branches; causal, so it can process a stream piece by piece.

    `stride` neighbouring frames make one step. The windows `thetas` are in steps, one block for each.
    """

    def __init__(
        self,
        num_mels: int,
        width: int,
        *,
        channels: int,
        order: int,
        thetas: tuple[float, ...],
        stride: int = 2,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.stride, self.width = stride, width
        self.sizes = {"width": width, "channels": channels, "order": order, "thetas": thetas, "stride": stride}
        """Constructor arguments of this encoder."""
        self.stem = nn.Linear(stride * num_mels, width)
        self.blocks = nn.ModuleList(
            MemoryBlock(width, channels=channels, order=order, theta=theta, dropout=dropout) for theta in thetas
        )
        self.norm = nn.LayerNorm(width)

    def forward(
        self, features: Shaped[Tensor, "B T M"], lengths: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B steps H"], Int[Tensor, " B"]]:
        """(B, T, M) to (B, T // stride, H), and how many of its steps belong to each utterance."""
        whole = features.shape[1] // self.stride * self.stride
        return self.advance(features[:, :whole], None)[0], lengths // self.stride

    def advance(
        self, features: Shaped[Tensor, "B T M"], states: States | None
    ) -> tuple[Float[Tensor, "B steps H"], States]:
        """Encode the next frames of a stream, a multiple of `stride`; returns steps and new memories."""
        x = self.stem(features.unflatten(1, (-1, self.stride)).flatten(2))
        after = []
        for index, block in enumerate(self.blocks):
            x, state = block(x, states[index] if states else None)
            after.append(state)
        return self.norm(x), after


class AttentionEncoder(nn.Module):
    """The encoder of the reference guide: per layer self-attention (post-norm), an `LMU`, layer norm, dropout.

    Not causal, without positions and without a branch around the unit; kept for comparison and for its sizes. There is
    a layer for each of `thetas`, in frames.
    """

    def __init__(
        self,
        num_mels: int,
        width: int,
        *,
        order: int,
        thetas: tuple[float, ...],
        head_size: int = 64,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.width = width
        self.stem = nn.Linear(num_mels, width)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(width, width // head_size, dropout=dropout, batch_first=True) for _ in thetas
        )
        self.attention_norm = nn.ModuleList(nn.LayerNorm(width) for _ in thetas)
        self.unit = nn.ModuleList(LMU(width, width, order, theta) for theta in thetas)
        self.unit_norm = nn.ModuleList(nn.LayerNorm(width) for _ in thetas)
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(width, width)

    def forward(
        self, features: Shaped[Tensor, "B T M"], lengths: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B steps H"], Int[Tensor, " B"]]:
        """(B, T, M) to (B, T, H); the lengths stay as they are."""
        if len(features) == 0:  # which attention does not take: one of silence, thrown away
            hidden, _ = self(features.new_zeros(1, 1, features.shape[2]), lengths.new_ones(1))
            return hidden[:0], lengths
        x = self.stem(features)
        beyond = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        layers: Any = zip(self.attention, self.attention_norm, self.unit, self.unit_norm, strict=True)
        for attention, attention_norm, unit, unit_norm in layers:
            attended, _ = attention(x, x, x, key_padding_mask=beyond, need_weights=False)
            x = attention_norm(x + attended)
            x = self.dropout(unit_norm(unit(x)[0]))
        return self.project(x), lengths


class SpeechRecogniser(nn.Module):
    """Log-probabilities of characters and blank per step, for CTC."""

    def __init__(self, standardise: nn.Module, encoder: MemoryEncoder | AttentionEncoder, num_outputs: int):
        super().__init__()
        self.standardise, self.encoder = standardise, encoder
        self.head = nn.Linear(encoder.width, num_outputs)

    def forward(
        self, features: Shaped[Tensor, "B T M"], lengths: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B steps num_outputs"], Int[Tensor, " B"]]:
        """(B, T, M), (B,) to (B, steps, num_outputs) and the steps of each utterance (B,)."""
        hidden, steps = self.encoder(self.standardise(features), lengths)
        return self.head(hidden).float().log_softmax(-1), steps

    def advance(
        self, features: Shaped[Tensor, "B T M"], states: States | None
    ) -> tuple[Float[Tensor, "B steps num_outputs"], States]:
        """The same for the next frames of a stream; see `MemoryEncoder.advance`. Raises TypeError with attention."""
        if not isinstance(self.encoder, MemoryEncoder):
            raise TypeError("attention needs the complete utterance, which a stream does not have")
        hidden, states = self.encoder.advance(self.standardise(features), states)
        return self.head(hidden).float().log_softmax(-1), states


class SpeechClassifier(nn.Module):
    """One class per utterance, read from the mean over its steps."""

    def __init__(self, standardise: nn.Module, encoder: MemoryEncoder | AttentionEncoder, num_classes: int):
        super().__init__()
        self.standardise, self.encoder = standardise, encoder
        self.head = nn.Linear(encoder.width, num_classes)

    def forward(self, features: Shaped[Tensor, "B T M"], lengths: Int[Tensor, " B"]) -> Float[Tensor, "B K"]:
        """(B, T, M), (B,) to logits (B, num_classes)."""
        hidden, steps = self.encoder(self.standardise(features), lengths)
        within = torch.arange(hidden.shape[1], device=hidden.device) < steps[:, None]
        total = torch.where(within[..., None], hidden, 0).sum(1)
        return self.head(total / steps.clamp(min=1)[:, None])
