"""Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv 1612.00796): a penalty on changes of important weights.

The penalty is strength / 2 * sum_i F_i (w_i - w*_i)^2 (eq. 3 there). F adds up the Fisher information of the tasks so
far and w* are the weights after the last of them (Huszár 2018, arXiv 1712.03847; Schwarz et al. 2018, arXiv
1805.06370), so its cost does not grow with the number of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from toolkit.data.batches import split
from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import world_size
from toolkit.experts.parallel.groups import sum_over_ranks
from toolkit.experts.parallel.seeding import generator
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from continual.streams import TaskStream
    from toolkit.train.trainer import Trainer

AT_ONCE = 500
"""Examples per forward pass when the Fisher information is estimated."""


@torch.enable_grad()
def fisher_information(
    model: nn.Module, inputs: Shaped[Tensor, "N ..."], classes: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Diagonal of the Fisher information of each parameter, added up over the examples `inputs` (N, ...):

        F_i = sum_n sum_c p(c | x_n) (d log p(c | x_n) / d w_i)^2

    Exact over all classes c, or those of `classes`, so no label is needed or drawn. The squares are of each example's
    own gradient: for a linear layer with one row per example that is an outer product, and squared outer products add
    up to one product of matrices of squares (after Goodfellow 2015, arXiv 1510.01799).

    Raises ValueError for a model that has trainable parameters outside of such layers.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(f"parameter {name!r} is not of a linear layer: its Fisher information cannot be computed")
    fisher = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for part in inputs.split(AT_ONCE):
        logits, read, written = _traced(model, layers, part)
        log_probs = (logits if classes is None else logits[:, list(classes)]).log_softmax(-1)
        squares = {name: torch.zeros_like(output) for name, output in written.items()}
        for log_prob in log_probs.unbind(1):
            slopes = torch.autograd.grad(log_prob.sum(), list(written.values()), retain_graph=True)
            for name, slope in zip(written, slopes, strict=True):
                squares[name].addcmul_(slope.square(), log_prob.detach().exp()[:, None])
        for name, square in squares.items():
            fisher[f"{name}.weight"].addmm_(square.T, read[name].square())
            if f"{name}.bias" in fisher:
                fisher[f"{name}.bias"].add_(square.sum(0))
    return fisher


def _traced(
    model: nn.Module, layers: dict[str, nn.Linear], inputs: Tensor
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The output of `model`, and what each of its `layers` read and wrote, each (N, features)."""
    read: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}

    def record(name: str, _layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if name in read or args[0].shape[:-1] != inputs.shape[:1]:
            raise ValueError(f"linear layer {name!r} does not have one row per example")
        read[name] = args[0].detach()
        written[name] = output

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_hook(partial(record, name)).remove)
        return model(inputs), read, written


class ElasticWeights:
    """The penalty that holds the weights of `model`; call it for this rank's share, to add to a task's loss.

    Its state is in buffers of `model`, which checkpoints save: make it before the model is prepared. For models of
    replicated linear layers, see `fisher_information`.
    """

    def __init__(self, model: nn.Module, strength: float):
        if strength < 0:
            raise ValueError(f"strength {strength} would push weights away")
        self.model, self.strength = model, strength
        self.held = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for index, parameter in enumerate(self.held.values()):
            model.register_buffer(f"ewc_importance_{index}", torch.zeros_like(parameter))
            model.register_buffer(f"ewc_anchor_{index}", parameter.detach().clone())

    @property
    def importance(self) -> list[Tensor]:
        """Fisher information of all tasks consolidated so far, a mean over examples for each, by parameter."""
        return [self.model.get_buffer(f"ewc_importance_{index}") for index in range(len(self.held))]

    @property
    def anchors(self) -> list[Tensor]:
        """The weights when a task was last consolidated, by parameter."""
        return [self.model.get_buffer(f"ewc_anchor_{index}") for index in range(len(self.held))]

    def __call__(self) -> Tensor:
        terms = [
            (importance * (parameter - anchor).square()).sum()
            for parameter, importance, anchor in zip(self.held.values(), self.importance, self.anchors, strict=True)
        ]
        return torch.stack(terms).sum() * (self.strength / 2 / world_size())

    @torch.no_grad()
    def consolidate(self, fisher: dict[str, Tensor]) -> None:
        """Add a task's `fisher` information, the mean over its examples, and hold the weights where they are now."""
        for (name, parameter), importance, anchor in zip(self.held.items(), self.importance, self.anchors, strict=True):
            importance.add_(fisher[name])
            anchor.copy_(parameter)


class Consolidation(Callback):
    """Consolidates each task of `stream` when its last step (`task_ends`) was made, on `samples` of its examples."""

    def __init__(self, elastic: ElasticWeights, stream: TaskStream, task_ends: Sequence[int], *, samples: int = 1000):
        self.elastic, self.stream, self.samples = elastic, stream, samples
        self.task_at = {end: task for task, end in enumerate(task_ends)}

    def on_fit_start(self, trainer: Trainer) -> None:
        if (dense := trainer.run.config.dense_parallel) != "ddp":
            raise UserError(f"dense_parallel={dense!r} shards weights that elastic weights need whole: use ddp.")

    def on_step_end(self, trainer: Trainer) -> None:
        task = self.task_at.get(trainer.state.step)
        if task is None:
            return
        run, model = trainer.run, trainer.raw_model
        sizes = self.stream.sizes
        draws = generator(run.seed, "consolidation", task)
        rows = sum(sizes[:task]) + torch.randperm(sizes[task], generator=draws)[: self.samples]
        inputs = self.stream.train[split(rows, run.world_size, run.rank)]["input"].to(run.device)
        classes = None if self.stream.classes is None else self.stream.classes[task]
        model.eval()
        fisher = fisher_information(model, inputs, classes)
        model.train()
        for total in fisher.values():
            sum_over_ranks(total).div_(len(rows))
        self.elastic.consolidate(fisher)
