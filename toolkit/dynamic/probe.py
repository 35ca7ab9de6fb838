"""Evaluates the model on chosen training samples: which ones it does not cover, and which experts they are routed to.

Samples go through the model in evaluation mode, split over the ranks, so that the results do not depend on the number
of ranks. Letters as in `toolkit.experts.layer.router`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.dynamic.coverage import HALF_PROBABILITY
from toolkit.dynamic.dynamic_router import Hyperplane
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.parallel.collectives import sum_over_ranks


@dataclass(frozen=True)
class LayerView:
    """A layer's inputs and routing for the tokens of this rank."""

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor


@dataclass(frozen=True)
class Probe:
    """The model's losses on the samples, and what each layer did with them."""

    losses_T: Tensor
    """float64, of this rank's tokens: the loss of the token's sample."""
    views: tuple[LayerView, ...]
    samples: int
    """The number of samples over all ranks."""
    loss: float
    """Mean over the samples of all ranks, in nats."""
    uncovered: float
    """Fraction of the samples of all ranks with a loss above `HALF_PROBABILITY`."""

    def is_worse(self, before: Probe, allowed: float) -> bool:
        """Returns whether the mean loss is higher than it was `before` on the same samples: by more than the fraction
        `allowed`, and by more than two standard errors of the mean of the differences, sample by sample. True for a
        loss that is not a number. For probes without views. A collective.

        The standard error of a few samples with a huge loss is huge too: it excuses `HALF_PROBABILITY` at most.
        """
        rise_N = self.losses_T - before.losses_T
        rise, squares = sum_over_ranks(torch.stack([rise_N.sum(), rise_N.square().sum()])).tolist()
        mean = rise / self.samples
        variance = (squares / self.samples - mean**2) / max(1, self.samples - 1)
        chance = min(2 * max(0.0, variance) ** 0.5, HALF_PROBABILITY)
        return not mean <= max(allowed * before.loss, chance)

    def uncovered_weight(self, layer: int, logical_experts: int) -> Tensor:
        """Returns float64 (E), each logical expert's sum of routing weights of uncovered tokens. A collective."""
        view = self.views[layer]
        weights_TK = view.weights_TK.double() * (self.losses_T > HALF_PROBABILITY).unsqueeze(1)
        total_E = weights_TK.new_zeros(logical_experts).scatter_add_(
            0, view.expert_ids_TK.flatten(), weights_TK.flatten()
        )
        return sum_over_ranks(total_E)

    def hyperplane(self, layer: int, logical_id: int) -> Hyperplane:
        """Returns the hyperplane halfway between the means of an expert's uncovered and its covered tokens, normal to
        their difference.

        If the expert has no uncovered tokens, or no covered ones: through the mean of all its tokens, normal to the
        coordinate with the highest variance. A collective.
        """
        view = self.views[layer]
        routed_T = (view.expert_ids_TK == logical_id).any(1)
        uncovered_T = self.losses_T > HALF_PROBABILITY
        masks = torch.stack([routed_T & uncovered_T, routed_T & ~uncovered_T]).double()
        x_TD = view.x_TD.double()
        sums = torch.cat([masks @ x_TD, masks @ x_TD.square(), masks.sum(1, keepdim=True).expand(2, x_TD.shape[1])])
        total = sum_over_ranks(sums)
        sum_2D, square_2D, count_2D = total.split(2)
        if (count_2D[:, 0] > 0).all():
            mean_2D = sum_2D / count_2D
            normal_D = mean_2D[0] - mean_2D[1]
            return Hyperplane(normal_D.float(), float(normal_D @ mean_2D.mean(0)))
        count_D = count_2D.sum(0).clamp(min=1)
        mean_D = sum_2D.sum(0) / count_D
        widest = int((square_2D.sum(0) / count_D - mean_D.square()).argmax())
        normal_D = torch.zeros_like(mean_D)
        normal_D[widest] = 1
        return Hyperplane(normal_D.float(), float(mean_D[widest]))


@torch.no_grad()
def probe_samples(
    model: nn.Module, sample_losses: Callable[[], Tensor], layers: Sequence[MoE], *, samples: int
) -> Probe:
    """Evaluates `model` on chosen samples, of which each rank has a part. A collective.

    Args:
        model: The model; it is in evaluation mode for the time of the call, and in training mode afterwards.
        sample_losses: Runs `model` on this rank's part and returns the loss of each of its samples (N), in nats.
        layers: MoE layers of `model`, whose inputs and routing the probe is to have as `views`.
        samples: The number of samples over all ranks.
    """
    captured: list[list[LayerView]] = [[] for _ in layers]

    def append_view(views: list[LayerView], module: nn.Module, args: tuple[Tensor, ...], routing: Any) -> None:  # noqa: ARG001
        views.append(LayerView(args[0], routing.expert_ids_TK, routing.weights_TK))

    model.eval()
    with ExitStack() as hooks:
        for layer, views in zip(layers, captured, strict=True):
            hooks.callback(layer.router.register_forward_hook(partial(append_view, views)).remove)
        losses_N = sample_losses().double()
    model.train()
    summed = torch.stack([losses_N.sum(), (losses_N > HALF_PROBABILITY).double().sum()])
    loss, uncovered = sum_over_ranks(summed).tolist()
    seen = tuple(first for first, *_ in captured)
    per_sample = len(seen[0].x_TD) // len(losses_N) if len(losses_N) and seen else 1
    losses_T = losses_N.repeat_interleave(per_sample)
    return Probe(losses_T, seen, samples, loss / samples, uncovered / samples)
