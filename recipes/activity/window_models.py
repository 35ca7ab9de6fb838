"""Classifiers for windows of several signals: a convolutional encoder, and ways to show it the channels."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

import toolkit as tk

if TYPE_CHECKING:
    from jaxtyping import Float

Mode = Literal["all_channels", "flatten", "average", "first"]
"""Input of the encoder: all channels; each channel separately; their mean; only the first."""
GROUPS = 8
"""Groups of the group normalisation, which is independent of batch size and number of ranks."""


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut (He et al. 2016): (N, width_in, T) to (N, width, T / stride)."""

    def __init__(self, width_in: int, width: int, *, kernel: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(width_in, width, kernel, stride=stride, padding=kernel // 2, bias=False),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            nn.Conv1d(width, width, kernel, padding=kernel // 2, bias=False),
            nn.GroupNorm(GROUPS, width),
        )
        same = stride == 1 and width_in == width
        self.shortcut = nn.Identity() if same else nn.Conv1d(width_in, width, 1, stride=stride, bias=False)

    def forward(self, x: Float[Tensor, "N C T"]) -> Float[Tensor, "N H S"]:
        return (self.shortcut(x) + self.body(x)).relu()


class WindowEncoder(nn.Module):
    """Windows (N, channels, T) to vectors (N, `width_out`): a stem, residual blocks, mean and maximum over time.

    Each of the four blocks but the first halves the time axis; `T` is at least 8.
    """

    def __init__(self, channels: int, *, width: int = 16, kernel: int = 5):
        super().__init__()
        widths = (width, 2 * width, 2 * width, 4 * width)
        self.width_out = 2 * widths[-1]
        self.stem = nn.Sequential(
            nn.Conv1d(channels, width, 7, padding=3, bias=False), nn.GroupNorm(GROUPS, width), nn.ReLU()
        )
        blocks = [ResidualBlock(width, width, kernel=kernel, stride=1)]
        blocks += [ResidualBlock(before, after, kernel=kernel, stride=2) for before, after in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Float[Tensor, "N C T"]) -> Float[Tensor, "N F"]:
        x = self.blocks(self.stem(x))
        return torch.cat([x.mean(-1), x.amax(-1)], dim=-1)


class WindowClassifier(nn.Module):
    """Logits (B, views, classes) for windows (B, channels, T): one view, or one per channel in the mode `flatten`.

    `encoder` maps (N, `view_channels`, T) to (N, F), and `head` (N, F) to (N, classes). `mean` and `std` (channels,)
    standardise the signals in the model, not in the data, so that it takes raw readings. Raises UserError for an
    unknown `mode`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: nn.Module, head: nn.Module, *, mode: Mode, mean: Tensor, std: Tensor):
        super().__init__()
        self.encoder, self.head, self.mode = encoder, head, mode
        self.register_buffer("mean", mean[:, None].clone(), persistent=False)
        self.register_buffer("std", std[:, None].clone(), persistent=False)

    def views(self, windows: Float[Tensor, "B C T"]) -> Float[Tensor, "B V C_V T"]:
        """(B, views, view_channels, T) of (B, channels, T)."""
        x = (windows - self.mean) / self.std
        if self.mode == "all_channels":
            return x[:, None]
        if self.mode == "flatten":
            return x[:, :, None]
        return x.mean(1, keepdim=True)[:, None] if self.mode == "average" else x[:, None, :1]

    def forward(self, windows: Float[Tensor, "B C T"]) -> Float[Tensor, "B V K"]:
        views = self.views(windows)
        logits = self.head(self.encoder(views.flatten(0, 1)))
        return logits.view(*views.shape[:2], logits.shape[-1])


def view_channels(mode: Mode, channels: int) -> int:
    """How many channels an encoder sees at a time. Raises UserError for an unknown `mode`."""
    return channels if mode == "all_channels" else 1


def load_encoder(model: nn.Module, path: Path) -> None:
    """Load the weights of `model.encoder` from a `model.safetensors` of another run, or of one such encoder.

    Raises UserError if the file is invalid or does not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise tk.UserError(
            f"encoder_path={str(path)!r}: it cannot be read as safetensors ({error}): take another."
        ) from None
    weights = {name.removeprefix("encoder."): value for name, value in tensors.items() if name.startswith("encoder.")}
    encoder = model.get_submodule("encoder")
    own = encoder.state_dict()
    for name, value in own.items():
        found = weights.get(name)
        if found is None or found.shape != value.shape:
            has = "none of this name" if found is None else f"one of {tuple(found.shape)}"
            raise tk.UserError(
                f"encoder_path={str(path)!r}: the encoder's {name} is {tuple(value.shape)} and the file has {has}: "
                "take one of a run with the same mode, width and channels."
            )
    encoder.load_state_dict({name: weights[name] for name in own})
