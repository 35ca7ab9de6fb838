"""Classifiers for images as flat vectors (permutation-invariant)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped, UInt8


class Pixels(nn.Module):
    """uint8 images (B, ...) to standardised float vectors (B, num_pixels).

    Part of the model, so that data sets stay small on disk and in transfer. Where the fraction `blank` of the pixels
    is hidden in training, the whole image is scaled down by as much in evaluation (Srivastava et al. 2014, JMLR 15).
    """

    def __init__(self, mean: float, std: float, *, blank: float = 0.0):
        super().__init__()
        self.mean, self.std, self.blank = mean, std, blank

    def forward(self, images: UInt8[Tensor, "B ..."]) -> Float[Tensor, "B P"]:
        kept = 1.0 if self.training else 1 - self.blank
        return images.flatten(1).float().sub_(255 * self.mean).mul_(kept / (255 * self.std))


class MLP(nn.Sequential):
    """Linear layers with ReLU between them: `MLP(784, 256, 10)` has one hidden layer of 256."""

    def __init__(self, *widths: int):
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        super().__init__(*layers[:-1])


class ResidualClassifier(nn.Module):
    """A linear stem, one residual block (an MLP or an MoE layer), and a linear head.

    `pixels` turns a batch of images into (B, num_pixels), `block` maps (B, dim) to (B, dim); returns logits
    (B, num_classes).
    """

    def __init__(self, pixels: nn.Module, block: nn.Module, *, num_pixels: int, dim: int, num_classes: int):
        super().__init__()
        self.pixels = pixels
        self.stem = nn.Linear(num_pixels, dim)
        self.block = block
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Shaped[Tensor, "B ..."]) -> Float[Tensor, "B C"]:
        x = self.stem(self.pixels(images)).relu()
        return self.head((x + self.block(x)).relu())
