"""The semi-supervised autoencoder of the reference, for comparison: a relaxed class, several samples.

B images, S samples, C classes, D style dimensions, P pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toolkit as tk
from autoencoder.labels import UNLABELLED, correct
from autoencoder.vae import to_unit

if TYPE_CHECKING:
    from jaxtyping import Float, Integer

SAMPLES = 8
TEMPERATURE = 0.66


class RelaxedVAE(nn.Module):
    """q(y | x) Concrete(logits, 0.66), q(z | x, y) normal, p(x | y, z) Bernoulli; one hidden layer either way."""

    def __init__(self, *, num_pixels: int = 784, num_classes: int = 10, style_dim: int = 10, hidden: int = 256):
        super().__init__()
        self.num_classes = num_classes
        self.noise_shape = (SAMPLES, num_classes + style_dim)
        self.stem = nn.Linear(num_pixels, hidden)
        self.to_logits = nn.Linear(hidden, num_classes)
        self.to_style = nn.Linear(num_classes + hidden, 2 * style_dim)
        self.decoder = nn.Sequential(
            nn.Linear(num_classes + style_dim, hidden), nn.ReLU(), nn.Linear(hidden, num_pixels)
        )

    def draw(
        self, hidden: Float[Tensor, "B H"], classes: Integer[Tensor, " B"], styles: Float[Tensor, "N D"]
    ) -> dict[str, Tensor]:
        """Return `reconstruction` (B, P) from the mean style under `classes`, and `samples` (N, C, P) of each class
        with `styles`, as means of the pixels."""
        every = torch.eye(self.num_classes, device=hidden.device)
        mean, _ = self.to_style(torch.cat([every[classes], hidden], -1)).chunk(2, -1)
        shape = len(styles), self.num_classes, -1
        sampled = torch.cat([every.expand(shape), styles[:, None].expand(shape)], -1)
        own = torch.cat([every[classes], mean], -1)
        return {"reconstruction": self.decoder(own).sigmoid(), "samples": self.decoder(sampled).sigmoid()}

    def forward(
        self,
        images: Tensor,
        noise: Tensor,
        *,
        label: Tensor | None = None,
        styles: bool = False,
        pictures: bool = False,
    ) -> dict[str, Tensor]:
        """Return `logits` (B, C), `log_weight` (B, S), `mean_class` (B, C), and with `pictures` those of `draw`.

        `noise` (B, S, C + D) is standard normal; an unknown `label` (B,), -1, is drawn. `log_weight` is
        log p(x, z | y) / q(z | x, y) in nats, `mean_class` the weighted mean of the samples of y.

        The bound omits the divergence of the class from its prior: with it, unlabelled images do not use the class, and
        the study's figures cannot be reached (docs/recipes/vae.md).
        """
        x = to_unit(images)
        hidden = self.stem(x).relu()
        logits = self.to_logits(hidden).float()
        y = self.relaxed(logits, noise[..., : self.num_classes])
        if label is not None:
            given = F.one_hot(label.clamp_min(0), self.num_classes).float()[:, None]
            y = torch.where((label == UNLABELLED)[:, None, None], y, given)
        mean, log_std = (
            self.to_style(torch.cat([y, hidden[:, None].expand(-1, y.shape[1], -1)], -1)).float().chunk(2, -1)
        )
        draw = noise[..., self.num_classes :]
        z = mean + log_std.exp() * draw
        pixels = self.decoder(torch.cat([y, z], -1)).float()
        likelihood = (pixels * x[:, None] - F.softplus(pixels)).sum(-1)
        # Of the two normal densities the constants cancel.
        style = (0.5 * draw.square() + log_std - 0.5 * z.square()).sum(-1)
        log_weight = likelihood + style
        out = {
            "logits": logits,
            "log_weight": log_weight,
            "mean_class": (log_weight.softmax(-1)[..., None] * y).sum(1),
        }
        if styles:
            out["style"] = mean.mean(1)
        return out | self.draw(hidden, logits.argmax(-1), draw[:, 0]) if pictures else out

    def relaxed(self, logits: Tensor, normal: Tensor) -> Tensor:
        """Samples (B, S, C) of the class (Maddison et al. 2017, sec. 3.2); `normal` (B, S, C) become Gumbel draws by
        way of uniform ones."""
        uniform = torch.special.ndtr(normal).clamp(1e-6, 1 - 1e-6)
        return ((logits[:, None] - (-uniform.log()).log()) / TEMPERATURE).softmax(-1)


class RelaxedBound:
    """The bound of `RelaxedVAE`: the reference's objective, for comparison with `SemiSupervised`.

    A known class adds 1 + `supervision_weight` times its log probability. (After Narayanaswamy et al. 2017, NeurIPS,
    with one weight.) With a known class, all samples have equal weight. Labels come from the batch, -1 if unknown. The
    prediction is the best class in the weighted mean of the samples, as in the study; `logit_accuracy` uses the logits.
    """

    def __init__(self, supervision_weight: float):
        self.supervision_weight = supervision_weight

    def count(self, batch: tk.Batch) -> int:
        return len(batch["input"])

    def loss(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        label = batch["label"]
        out = model(batch["input"], batch["noise"], label=label)
        elbo = out["log_weight"].mean(-1)
        known = F.cross_entropy(out["logits"], label, ignore_index=-1, reduction="sum")
        return tk.Loss((1 + self.supervision_weight) * known - elbo.sum(), len(label), sums={"elbo": elbo.sum()})

    def evaluate(self, model: nn.Module, batch: tk.Batch) -> tk.Loss:
        out = model(batch["input"], batch["noise"])
        label = batch["label"]
        hits = {"accuracy": correct(out["mean_class"], label), "logit_accuracy": correct(out["logits"], label)}
        return tk.Loss(-out["log_weight"].mean(-1).sum(), len(label), sums=hits)
