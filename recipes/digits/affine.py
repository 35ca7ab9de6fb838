"""Random affine maps of small images: turned, scaled, sheared and shifted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

DRAWS = 5
"""Numbers that an affine map is made of."""


@dataclass(frozen=True, kw_only=True)
class AffineRange:
    """The largest changes; each is drawn evenly between its negative and itself."""

    degrees: float = 15.0
    """The largest turn about the middle."""
    scale: float = 0.15
    """The largest change of scale as a fraction: 0.15 is a scale of 0.85 to 1.15."""
    shear: float = 0.15
    """Pixels to the side for each pixel up."""
    shift: float = 3.0
    """Pixels, along either axis."""

    def times(self, factor: float) -> AffineRange:
        """All of them `factor` times as large."""
        return AffineRange(**{name: factor * value for name, value in vars(self).items()})


def warp(images: UInt8[Tensor, "N ..."], draws: Float[Tensor, "N 5"], largest: AffineRange) -> UInt8[Tensor, "N ..."]:
    """`images`, each under the affine map that its row of `draws` (N, 5) gives: angle, scale, shear, and the shifts
    along x and y, each between -1 and 1 in units of `largest`. Bilinear, black beyond the border.
    """
    if not len(images):  # torch raises
        return images
    angle = draws[:, 0] * math.radians(largest.degrees)
    scale = 1 + draws[:, 1] * largest.scale
    height, width = images.shape[-2:]
    stacked = images.view(len(images), -1, height, width).float()
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()], 1), torch.stack([angle.sin(), angle.cos()], 1)], 1)
    slant = torch.eye(2).repeat(len(images), 1, 1)
    slant[:, 0, 1] = draws[:, 2] * largest.shear
    # The image reaches from -1 to 1.
    shift = torch.stack([draws[:, 3] * (2 * largest.shift / width), draws[:, 4] * (2 * largest.shift / height)], 1)
    theta = torch.cat([turn @ slant * scale[:, None, None], shift[:, :, None]], 2)
    grid = F.affine_grid(theta, list(stacked.shape), align_corners=False)
    return F.grid_sample(stacked, grid, align_corners=False).round().to(torch.uint8).view(images.shape)
