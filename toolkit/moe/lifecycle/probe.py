"""Looking into the layers: which samples the model fails, who is responsible, and how experts differ.

Rows of the training table go through the model in evaluation mode, split over the ranks, so that the readings are
those of one process on any number of them. Letters as in `toolkit.moe.router`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from toolkit.moe.layer import MoE
from toolkit.moe.lifecycle.coverage import HALF_PROBABILITY
from toolkit.moe.lifecycle.surgery import Divider
from toolkit.parallel.groups import sum_over_ranks

if TYPE_CHECKING:
    from toolkit.task import Batch
    from toolkit.trainer import Trainer


class ScoresSamples(Protocol):
    """A task that can say how badly the model does on each sample."""

    def sample_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N): nats, each sample's own."""
        ...


@dataclass(frozen=True)
class LayerView:
    """What one layer did with the tokens of this rank."""

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor


@dataclass(frozen=True)
class Probe:
    """The model on some rows of the table."""

    losses_T: Tensor
    """float64, this rank's: the loss of each token's sample."""
    views: tuple[LayerView, ...]
    samples: int
    """Over all ranks."""
    loss: float
    """Mean over all ranks' samples, in nats."""
    uncovered: float
    """Fraction of all ranks' samples with a loss above `HALF_PROBABILITY`."""

    def responsibility(self, layer: int, logical_experts: int) -> Tensor:
        """float64 (E): the routing weight that uncovered tokens gave each seat, over all ranks. A collective."""
        view = self.views[layer]
        weights_TK = view.weights_TK.double() * (self.losses_T > HALF_PROBABILITY).unsqueeze(1)
        total_E = weights_TK.new_zeros(logical_experts).scatter_add_(
            0, view.expert_ids_TK.flatten(), weights_TK.flatten()
        )
        return sum_over_ranks(total_E)

    def divider(self, layer: int, logical_id: int) -> Divider:
        """What best tells the uncovered tokens of a seat from its covered ones by their means: the plane half-way
        between these. A collective.

        Where the seat has no covered tokens, or no uncovered ones, the plane through the mean of all its tokens across
        the coordinate in which they vary most.
        """
        view = self.views[layer]
        of_logical_T = (view.expert_ids_TK == logical_id).any(1)
        uncovered_T = self.losses_T > HALF_PROBABILITY
        masks = torch.stack([of_logical_T & uncovered_T, of_logical_T & ~uncovered_T]).double()
        x_TD = view.x_TD.double()
        sums = torch.cat([masks @ x_TD, masks @ x_TD.square(), masks.sum(1, keepdim=True).expand(2, x_TD.shape[1])])
        total = sum_over_ranks(sums)
        sum_2D, square_2D, count_2D = total.split(2)
        if (count_2D[:, 0] > 0).all():
            mean_2D = sum_2D / count_2D
            direction_D = mean_2D[0] - mean_2D[1]
            return Divider(direction_D.float(), float(direction_D @ mean_2D.mean(0)))
        count_D = count_2D.sum(0).clamp(min=1)
        mean_D = sum_2D.sum(0) / count_D
        widest = int((square_2D.sum(0) / count_D - mean_D.square()).argmax())
        direction_D = torch.zeros_like(mean_D)
        direction_D[widest] = 1
        return Divider(direction_D.float(), float(mean_D[widest]))


@torch.no_grad()
def probe_samples(trainer: Trainer, task: ScoresSamples, layers: Sequence[MoE], rows: Tensor) -> Probe:
    """Send `rows` of the training table, the same on all ranks, through the model as it is. A collective."""
    captured: list[list[LayerView]] = [[] for _ in layers]

    def watch(views: list[LayerView]) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], routing: Any) -> None:  # noqa: ARG001
            views.append(LayerView(args[0], routing.expert_ids_TK, routing.weights_TK))

        return hook

    model = trainer.raw_model
    batch = trainer.batches.part_of(rows)
    model.eval()
    with ExitStack() as hooks:
        for layer, views in zip(layers, captured, strict=True):
            hooks.callback(layer.router.register_forward_hook(watch(views)).remove)
        with trainer.autocast():
            losses_N = task.sample_losses(model, batch).double()
    model.train()
    summed = torch.stack([losses_N.sum(), (losses_N > HALF_PROBABILITY).double().sum()])
    loss, uncovered = sum_over_ranks(summed).tolist()
    seen = tuple(first for first, *_ in captured)
    per_sample = len(seen[0].x_TD) // len(losses_N) if len(losses_N) and seen else 1
    losses_T = losses_N.repeat_interleave(per_sample)
    return Probe(losses_T, seen, len(rows), loss / len(rows), uncovered / len(rows))


@torch.no_grad()
def output_distances(layer: MoE, x_TD: Tensor, logical_ids: Sequence[int]) -> Tensor:
    """float64 (L, L): how differently the experts on `logical_ids` answer all ranks' tokens. A collective.

    |f - g| / sqrt(|f|^2 + |g|^2), with norms over tokens: 0 for the same answers, 1 for unrelated ones.
    """
    dispatcher, answers = layer.expert_stack.dispatcher, []
    for logical_id in logical_ids:
        ids_T1 = torch.full((len(x_TD), 1), logical_id, device=x_TD.device)
        rows, plan = dispatcher.dispatch(x_TD, ids_T1)
        rows = layer.experts(rows, plan.rows_per_slot)
        answers.append(dispatcher.combine(rows, plan, x_TD.new_ones(len(x_TD), 1)).double().flatten())
    answers_LN = torch.stack(answers)
    products_LL = sum_over_ranks(answers_LN @ answers_LN.T)
    size_L = products_LL.diagonal()
    both_LL = size_L.unsqueeze(0) + size_L.unsqueeze(1)
    return ((both_LL - 2 * products_LL).clamp(min=0) / both_LL.clamp(min=1e-30)).sqrt()
