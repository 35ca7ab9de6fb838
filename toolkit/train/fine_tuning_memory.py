"""The memory that fine-tuning a mixture of transformers takes in each process, from its configuration alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from toolkit.integrations.transformers.language_models import recompute_blocks
from toolkit.integrations.transformers.rank_skeleton import bytes_to_read, frozen_bytes, rank_skeleton
from toolkit.train.expected_memory import ExpectedMemory, expected_memory
from toolkit.train.tasks.language_modeling import LanguageModeling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


FEW_LAYERS = 4, 8
"""Layers that are looked at of deeper models; kinds of layers that alternate do so in a period that divides 4."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a mixture is fine-tuned, as far as memory goes."""

    ep_size: int
    """The processes that share the experts; each has the rest of the model."""
    spare_slots: int = 0
    """Of each process, for replicas."""
    sequences: int
    """In a micro-batch of a process."""
    context: int
    """Tokens of a sequence."""
    dtype: torch.dtype = torch.bfloat16
    """Of the model's weights."""
    quantize: Literal["4bit"] | None = None
    """See `experts_in_files`."""
    offload: Literal["file", "host"] | None = None
    """Where frozen experts stay: in a file, which takes no memory that others need; or outside of a GPU, which has room
    for those of two layers."""
    gradient_checkpointing: bool = False
    """Whether blocks are computed again in the backward."""


def fine_tuning_memory(
    config: PreTrainedConfig,
    layout: Layout,
    adapt: Callable[[Any], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> ExpectedMemory:
    """Returns what each process takes under an even load, with experts loaded by `experts_in_files`.

    Args:
        config: What `AutoConfig.from_pretrained` returns.
        layout: How it is trained.
        adapt: Adds adapters, and returns the model that has them.
        build_optimizer: Called with the model; None for AdamW.

    Raises:
        UserError: As `rank_skeleton`.
    """

    def of_layers(layers: int) -> ExpectedMemory:
        return _expect(config, layout, adapt, build_optimizer or _adamw, layers)

    few, more = FEW_LAYERS
    layers = config.num_hidden_layers
    if layers <= more:
        return of_layers(layers)
    one, other = of_layers(few), of_layers(more)
    # Layers repeat in a period that divides both, so the rest takes what those between them take.
    times = (layers - few) / (more - few)
    parts = [x + round((y - x) * times) for x, y in zip(astuple(one), astuple(other), strict=True)]
    return replace(ExpectedMemory(*parts), loading=max(one.loading, other.loading))


def _expect(
    config: PreTrainedConfig,
    layout: Layout,
    adapt: Callable[[Any], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    layers: int,
) -> ExpectedMemory:
    """Returns what a model of the first `layers` layers takes."""

    def adapted(model: Any) -> nn.Module:
        if layout.gradient_checkpointing:
            recompute_blocks(model)
        return adapt(model)

    model = rank_skeleton(
        config,
        ep_size=layout.ep_size,
        spare_slots=layout.spare_slots,
        dtype=layout.dtype,
        quantize=layout.quantize,
        adapt=adapted,
        layers=layers,
    )
    loading, frozen = bytes_to_read(model), frozen_bytes(model) if layout.offload else [0]
    outside, two_layers = sum(frozen), 2 * max(frozen) if layout.offload == "host" else 0
    batch = {"tokens": torch.empty(layout.sequences, layout.context + 1, dtype=torch.int64, device="meta")}
    found = expected_memory(model, LanguageModeling(), batch, build_optimizer)
    host = outside if layout.offload == "host" else 0
    return replace(found, weights=found.weights - outside + two_layers, loading=loading, host=host)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
