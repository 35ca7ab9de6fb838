"""A small convolutional network for images."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import toolkit as tk
from autoencoder.vae import local_divergence, to_unit

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8


class ConvolutionalClassifier(nn.Module):
    """Four convolutions, the first with stride 2, max-pooling after the second and fourth, and a linear head.

    `shape` is (H, W) or (channels, H, W). The first two convolutions have `width` channels, the others twice that:
    75,754 parameters at 32. Nothing depends on the other images of a batch. `average` has the same layers with averaged
    weights, see `WeightAverage`, and is used in evaluation. `smoothness_radius` is the 2-norm of the perturbations of
    `local_divergence`.
    """

    def __init__(
        self,
        *,
        shape: Sequence[int] = (28, 28),
        num_classes: int = 10,
        width: int = 32,
        smoothness_radius: float = 1.0,
    ):
        super().__init__()
        *channels, height, size = shape
        depth = channels[0] if channels else 1
        # Sizes after the strided convolution, the pooling that rounds down and the pooling that rounds up.
        area = math.prod(-(-((side + 1) // 2 // 2) // 2) for side in (height, size))
        self.layers = nn.Sequential(
            nn.Unflatten(1, (depth, height, size)),
            nn.Conv2d(depth, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(2 * width * area, num_classes),
        )
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        self.average = copy.deepcopy(self.layers).requires_grad_(False)
        self.smoothness_radius = smoothness_radius

    def forward(
        self,
        images: UInt8[Tensor, "B ..."],
        *,
        averaged: bool = False,
        paired: UInt8[Tensor, "B2 ..."] | None = None,
        strong: UInt8[Tensor, "B ..."] | None = None,
        directions: Float[Tensor, "B P"] | None = None,
    ) -> dict[str, Tensor]:
        """Return `logits` (B, C) of uint8 `images`, from the averaged weights in evaluation or if `averaged`.

        With `paired` images, return `paired_logits` (B2, C) instead, and `strong_logits` (B, C) of the views `strong`;
        with `directions` (B, H * W), the start of a power iteration, also `divergence` (B,) in nats and `logits`.
        """
        if paired is None:
            layers = self.average if averaged or not self.training else self.layers
            return {"logits": layers(to_unit(images)).float()}
        asked = {"paired_logits": paired}
        if strong is not None:
            asked["strong_logits"] = strong
        if directions is not None:
            asked["logits"] = images
        x = to_unit(torch.cat(list(asked.values())))
        sizes = [len(some) for some in asked.values()]
        out = dict(zip(asked, self.layers(x).float().split(sizes), strict=True))
        if directions is not None:
            answers = out["logits"].detach()
            out["divergence"] = local_divergence(
                self.layers, x[len(x) - len(images) :], answers, directions, radius=self.smoothness_radius
            )
        return out


class WeightAverage(tk.Callback):
    """Exponential moving average of the weights of a `ConvolutionalClassifier`, updated after each step.

    At step t the decay is at most (t + 1) / (t + 10), so that the initial weights are soon forgotten. Checkpoints
    contain both sets of weights.
    """

    def __init__(self, decay: float):
        self.decay = decay

    def on_step_end(self, trainer: tk.Trainer) -> None:
        step = trainer.state.step
        decay = min(self.decay, (step + 1) / (step + 10))
        model = trainer.raw_model
        assert isinstance(model, ConvolutionalClassifier)
        move = get_ema_multi_avg_fn(decay)
        move(list(model.average.parameters()), list(model.layers.parameters()), None)
