"""Virtual adversarial training (Miyato et al. 2019, TPAMI 41:8, sec. 3.3): how much a classifier's answer changes in a
small ball around an image, in the direction in which it changes most. It needs no labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def local_divergence(
    classifier: Callable[[Tensor], Tensor],
    x: Float[Tensor, "B P"],
    logits: Float[Tensor, "B C"],
    directions: Float[Tensor, "B P"],
    *,
    radius: float,
) -> Float[Tensor, " B"]:
    """KL(q(y | x) || q(y | x + r)) in nats (B,), with r of 2-norm `radius` near the worst one.

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
