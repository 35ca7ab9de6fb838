"""The semi-supervised variational autoencoder M2 (Kingma et al. 2014, NeurIPS, sec. 2.2), with exact inference of the
class: all classes are enumerated, none is sampled.

    p(x, y, z) = p(y) N(z; 0, 1) Bernoulli(x; decoder(y, z)),    q(y, z | x) = q(y | x) q(z | x, y)

B images, C classes, P pixels, S style dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toolkit as tk

if TYPE_CHECKING:
    from jaxtyping import Float, Integer, UInt8


class StyleAutoencoder(nn.Module):
    """p(x | y, z) and q(z | x, y), two hidden layers of `hidden` units on either side."""

    def __init__(self, *, num_pixels: int, num_classes: int, style_dim: int, hidden: int):
        super().__init__()
        self.stem = tk.MLP(num_pixels, hidden, hidden)
        self.stem_of_class = nn.Parameter(0.1 * torch.randn(num_classes, hidden))
        self.posterior = nn.Linear(hidden, 2 * style_dim)
        self.from_style = nn.Linear(style_dim, hidden)
        self.from_class = nn.Parameter(torch.randn(num_classes, hidden))
        self.to_hidden = nn.Linear(hidden, hidden)
        self.to_pixels = nn.Linear(hidden, num_pixels)
        self.log_prior = -math.log(num_classes)

    def encode(self, x: Float[Tensor, "B P"]) -> tuple[Float[Tensor, "B C S"], Float[Tensor, "B C S"]]:
        """Mean and logarithm of the standard deviation of q(z | x, y) for each class y, each (B, C, S)."""
        hidden = (self.stem(x)[:, None] + self.stem_of_class).relu()
        mean, log_std = self.posterior(hidden).float().chunk(2, -1)
        return mean, log_std

    def decode(self, z: Float[Tensor, "B C S"]) -> Float[Tensor, "B C H"]:
        """Map styles (B, C, S) to the last hidden units (B, C, hidden); `to_pixels` maps these to logits."""
        hidden = (self.from_style(z) + self.from_class).relu()
        return self.to_hidden(hidden).relu()

    def draw(
        self, x: Float[Tensor, "B P"], classes: Integer[Tensor, " B"], styles: Float[Tensor, "N S"]
    ) -> dict[str, Tensor]:
        """Return `reconstruction` (B, P) from the mean style under `classes`, and `samples` (N, C, P) of each class
        with `styles`, as means of the pixels."""
        mean, _ = self.encode(x)
        own = self.decode(mean)[torch.arange(len(x), device=x.device), classes]
        sampled = self.decode(styles[:, None].expand(-1, len(self.from_class), -1))
        return {"reconstruction": self.to_pixels(own).sigmoid(), "samples": self.to_pixels(sampled).sigmoid()}

    def forward(self, x: Float[Tensor, "B P"], noise: Float[Tensor, "B S"]) -> Float[Tensor, "B C"]:
        """-L(x, y) of eq. 6 in nats, for each class y: (B, C).

        `x` (B, P) between 0 and 1; `noise` (B, S) is standard normal, and shared by the classes of an image, so that
        their difference is not its.
        """
        mean, log_std = self.encode(x)
        hidden = self.decode(mean + log_std.exp() * noise[:, None])
        # Bernoulli log-likelihood of grey values, summed over pixels: x * logit - softplus(logit). The first sum goes
        # through the hidden units, of which there are fewer, so that only one thing is done to all (B, C, P) logits.
        weight, bias = self.to_pixels.weight, self.to_pixels.bias
        fit = (hidden * (x @ weight)[:, None]).sum(-1, dtype=torch.float32) + (x * bias).sum(-1, keepdim=True)
        likelihood = fit - F.softplus(self.to_pixels(hidden)).sum(-1, dtype=torch.float32)
        divergence = (0.5 * (mean.square() + (2 * log_std).exp() - 1) - log_std).sum(-1)
        return likelihood - divergence + self.log_prior


class SemiSupervisedVAE(nn.Module):
    """q(y | x), and with `style_dim` the rest of M2; without it a plain classifier, for controls.

    `smoothness_radius` is the 2-norm of the perturbations under which q(y | x) is to stay as it is, see
    `local_divergence`. It knows nothing of neighbouring pixels.
    """

    def __init__(
        self,
        *,
        num_pixels: int = 784,
        num_classes: int = 10,
        style_dim: int | None = 10,
        hidden: int = 256,
        classifier_hidden: int = 512,
        smoothness_radius: float = 1.0,
    ):
        super().__init__()
        self.classifier = tk.MLP(num_pixels, classifier_hidden, classifier_hidden // 2, num_classes)
        self.autoencoder = None
        if style_dim is not None:
            self.autoencoder = StyleAutoencoder(
                num_pixels=num_pixels, num_classes=num_classes, style_dim=style_dim, hidden=hidden
            )
        self.smoothness_radius = smoothness_radius
        self.noise_shape = () if style_dim is None else (style_dim,)

    def forward(
        self,
        images: UInt8[Tensor, "B ..."],
        noise: Float[Tensor, "B S"] | None = None,
        *,
        paired: UInt8[Tensor, "B2 ..."] | None = None,
        directions: Float[Tensor, "B P"] | None = None,
        styles: bool = False,
        pictures: bool = False,
    ) -> dict[str, Tensor]:
        """Return `logits` (B, C) of q(y | x) for uint8 `images` (B, ...), and optional outputs.

        `noise` (B, S) gives `bounds` (B, C), see `StyleAutoencoder`; `paired` uint8 images give `paired_logits`;
        `directions` (B, P), the start of a power iteration, give `divergence` (B,), the local KL in nats; `styles`
        gives `style` (B, S), the mean under the likeliest class; `pictures` gives those of `StyleAutoencoder.draw`.
        """
        x = to_unit(images)
        out: dict[str, Tensor] = {}
        if paired is None:
            out["logits"] = self.classifier(x).float()
        else:
            both = self.classifier(torch.cat([x, to_unit(paired)])).float()
            out["logits"], out["paired_logits"] = both.split([len(x), len(paired)])
        if noise is not None and self.autoencoder is not None:
            out["bounds"] = self.autoencoder(x, noise)
        if directions is not None:
            answers = out["logits"].detach()
            out["divergence"] = local_divergence(self.classifier, x, answers, directions, radius=self.smoothness_radius)
        if styles and self.autoencoder is not None:
            mean, _ = self.autoencoder.encode(x)
            out["style"] = mean[torch.arange(len(x), device=x.device), out["logits"].argmax(-1)]
        if pictures and noise is not None and self.autoencoder is not None:
            out |= self.autoencoder.draw(x, out["logits"].argmax(-1), noise)
        return out


def to_unit(images: UInt8[Tensor, "B ..."]) -> Float[Tensor, "B P"]:
    """uint8 images (B, ...) as vectors (B, P) between 0 and 1."""
    return images.flatten(1).float().div_(255)


def local_divergence(
    classifier: Callable[[Tensor], Tensor],
    x: Float[Tensor, "B P"],
    logits: Float[Tensor, "B C"],
    directions: Float[Tensor, "B P"],
    *,
    radius: float,
) -> Float[Tensor, " B"]:
    """KL(q(y | x) || q(y | x + r)) in nats (B,), with r of 2-norm `radius` near the worst one.

    This is the term of virtual adversarial training (Miyato et al. 2019, TPAMI 41:8, sec. 3.3): how much a classifier's
    answer changes in a small ball around an image, in the direction in which it changes most. It needs no labels.

    `classifier` maps vectors (B, P) to logits (B, C), and `logits` are its answers at `x`, without a gradient. One step
    of power iteration from `directions` (B, P), of any length: the gradient of the divergence there is nearly the
    Hessian at `x` times the direction.
    """
    target = logits.log_softmax(-1)

    def divergence(r: Tensor) -> Tensor:
        shifted = classifier(x + r).float().log_softmax(-1)
        return F.kl_div(shifted, target, reduction="none", log_target=True).sum(-1)

    with torch.enable_grad():
        probe = F.normalize(directions, dim=1).requires_grad_()
        (gradient,) = torch.autograd.grad(divergence(probe).sum(), probe)
    return divergence(radius * F.normalize(gradient, dim=1))
