"""Counts of experts' parameters that are frozen, trained, or trained by adapters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from toolkit.experts.sharding.find import require_experts
from toolkit.experts.sharding.found import FoundExperts, outside_wrappers


@dataclass(frozen=True)
class TrainableParameter:
    """A stacked parameter of one layer's experts, with its adapters. Counts are over all experts and ranks."""

    layer: str
    name: str
    parameters: int
    """Numbers in the parameter."""
    trainable: int
    """Trainable numbers, in the parameter and in its adapters."""
    is_trained: bool
    """Whether the parameter itself is trainable."""
    ranks: tuple[int, ...]
    """Ranks of trainable adapters."""

    @property
    def state(self) -> str:
        """How it is trained, in words."""
        adapted = [f"adapters of rank {', '.join(map(str, self.ranks))}"] if self.ranks else []
        return " and ".join(["trained"] * self.is_trained + adapted) or "frozen"


class TrainableExperts(list[TrainableParameter]):
    """The parameters of a model's experts. Printed as a table with a row for parameters of one name and state."""

    def __str__(self) -> str:
        rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for each in self:
            rows[each.name, each.state].update(layers=1, parameters=each.parameters, trainable=each.trainable)
        width = max(len("experts"), *(len(name) for name, _ in rows))
        lines = [f"{'experts':{width}}  layers      parameters       trainable"]
        lines += [
            f"{name:{width}}  {of['layers']:6}  {of['parameters']:14,}  {of['trainable']:14,}  {state}"
            for (name, state), of in rows.items()
        ]
        return "\n".join(lines)


def trainable_experts(model: nn.Module) -> TrainableExperts:
    """Count the trainable parameters of each stacked parameter of experts, and of its adapters.

    Args:
        model: A model with experts, sharded or not, with or without adapters and wrappers.

    Returns:
        A list with a `TrainableParameter` for each parameter of each layer, which `print` shows as a table.

    Raises:
        UserError: The model has no experts that can be sharded.

    Example:
        >>> from toolkit.experts import make_moe, trainable_experts
        >>> print(trainable_experts(make_moe(8, 8, 8, 2)))
        experts  layers      parameters       trainable
        up            1             512             512  trained
        down          1             512             512  trained
    """
    layers = require_experts(model)
    return TrainableExperts(each for found in layers.values() for each in _parameters(found))


def _parameters(found: FoundExperts) -> Iterator[TrainableParameter]:
    packed = getattr(found.module, "packed", {})  # shapes of 4-bit matrices by name
    counts, trainable = dict[str, int](), Counter[str]()
    ranks: dict[str, set[int]] = defaultdict(set)
    trained: set[str] = set()
    for key, (parameter, form) in found.parameters().items():
        name, _, matrix = key.partition(".lora_")
        if key not in packed and not parameter.is_floating_point():
            continue  # scales of 4-bit matrices
        shape = packed[key].shape if key in packed else found.rows(parameter.detach(), form).shape[1:]
        count = found.num_experts * shape.numel()
        if not matrix:
            counts[name] = count
        if parameter.requires_grad:
            trained.add(key)
            trainable[name] += count
            if matrix.startswith("A"):
                ranks[name].add(shape[0])
    layer = outside_wrappers(found.name)
    for name, count in counts.items():
        yield TrainableParameter(layer, name, count, trainable[name], name in trained, tuple(sorted(ranks[name])))
