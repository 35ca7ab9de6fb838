"""Detection of a checkpoint's experts and routers, by the config's family and by names.

Experts are `<layer>.<expert>.<matrix>`, a tensor for each, or `<layer>.<matrix>`, a tensor with a row or a block of
rows for each. A layer is the module of the experts, such as `model.layers.0.mlp.experts`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from toolkit.audit.checkpoint import Checkpoint
from toolkit.integrations.transformers.compat import names_of_stacked_experts

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts", "n_experts")
EXPERT = re.compile(r"(?P<layer>(?:.*\.)?(?:\w*_)?experts)\.(?P<expert>\d{1,9})\.(?P<matrix>.+)")
STACKED = re.compile(r"(?P<layer>(?:.*\.)?(?:\w*_)?experts)\.(?P<matrix>[^\d].*)")
ROW_OF_RUN = re.compile(r"(?P<layer>.+)\.(?P<matrix>[^.]+)/(?P<expert>\d{1,9})")
SHARED = re.compile(r"(^|[._])shared?_(\w*_)?experts?\.")
ROUTER = re.compile(r"(?:.*\.)?(?:gate|router|wg|gate\.wg|router\.layer|router\.classifier|router\.proj)\.weight")


class Place(NamedTuple):
    """The rows of a tensor that are one expert's: all, or `size` rows from `begin`."""

    tensor: str
    begin: int = 0
    size: int | None = None


@dataclass
class Matrix:
    """A matrix of all experts of a layer."""

    layer: str
    name: str
    places: dict[int, Place] = field(default_factory=dict)
    """By expert."""


def settings_of_experts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of the config that has the number of experts, empty without one."""
    parts = (config, *(value for value in config.values() if isinstance(value, Mapping)))
    return next((part for part in parts if any(name in part for name in COUNTS)), {})


def count_experts(config: Mapping[str, Any]) -> int | None:
    """Return the experts of a layer by the config, None if it does not say or layers differ."""
    counts = (settings_of_experts(config).get(name) for name in COUNTS)
    return next((count for count in counts if isinstance(count, int) and 1 < count < 2**31), None)


def find_matrices(checkpoint: Checkpoint) -> dict[tuple[str, str], Matrix]:
    """Return the matrices of experts in `checkpoint` by layer and name."""
    found: dict[tuple[str, str], Matrix] = {}
    count, renamed = count_experts(checkpoint.config), _names_of_family(checkpoint.config)
    for tensor, listed in checkpoint.tensors.items():
        if SHARED.search(tensor) or 0 in listed.shape:
            continue
        if match := EXPERT.fullmatch(tensor) or ROW_OF_RUN.fullmatch(tensor):
            layer, matrix, places = match["layer"], match["matrix"], {int(match["expert"]): Place(tensor)}
        elif (match := STACKED.fullmatch(renamed(tensor))) and math.prod(listed.shape) > 1:
            layer, matrix = match["layer"], match["matrix"]
            experts, each = listed.shape[0] if listed.shape else 0, 1
            if len(listed.shape) < 3 and count and experts > count and experts % count == 0:
                experts, each = count, experts // count  # matrices below each other, as in DBRX
            places = {expert: Place(tensor, expert * each, each) for expert in range(experts)}
        else:
            continue
        found.setdefault((layer, matrix), Matrix(layer, matrix)).places.update(places)
    return found


def _names_of_family(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function that gives tensors of stacked experts the names that transformers gives them."""
    kinds = [config.get("model_type"), *(v.get("model_type") for v in config.values() if isinstance(v, Mapping))]
    renamings = [
        (re.compile(rf"(?<![^.]){source}$"), target)
        for kind in kinds
        if isinstance(kind, str)
        for source, target in names_of_stacked_experts(kind)
    ]

    def rename(tensor: str) -> str:
        for pattern, target in renamings:
            if pattern.search(tensor):
                return pattern.sub(target, tensor)
        return tensor

    return rename


def find_routers(checkpoint: Checkpoint, layers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each layer of experts with the name of its router's weight, a sibling of the experts."""
    parents = {layer.rpartition(".")[0]: layer for layer in layers}
    for tensor, listed in checkpoint.tensors.items():
        if ROUTER.fullmatch(tensor) and len(listed.shape) == 2:
            parent = tensor
            while parent and parent not in parents:
                parent = parent.rpartition(".")[0]
            if parent:
                yield parents[parent], tensor


def value_of(checkpoint: Checkpoint, place: Place) -> Tensor:
    """Return the values of one expert."""
    count, *_ = checkpoint.tensors[place.tensor].shape or (1,)
    size = count if place.size is None else place.size
    return checkpoint.rows(place.tensor, None, place.begin, place.begin + size)


def is_matrix(checkpoint: Checkpoint, place: Place) -> bool:
    """Whether an expert has two or more dimensions of a tensor."""
    return len(checkpoint.tensors[place.tensor].shape) - (place.size == 1) > 1


def is_integer(dtype: str) -> bool:
    """Whether a listed type is one of integers, such as packed weights."""
    return dtype.lower().startswith(("i", "u"))
