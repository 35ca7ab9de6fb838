"""Expected memory of each process that fine-tunes a transformers MoE model, from its configuration only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from toolkit.errors import UserError, require
from toolkit.experts.parallel.nodes import ranks_per_node
from toolkit.experts.sharding.find import experts_modules, find_experts, require_experts
from toolkit.experts.sharding.libraries import library_that_multiplies
from toolkit.integrations.transformers.kernel import use_toolkit_kernel
from toolkit.integrations.transformers.language_models import causal_lm, read_config, recompute_blocks
from toolkit.integrations.transformers.lazy_loading import experts_at_a_time
from toolkit.integrations.transformers.quantization import SCALES, give_packed_shapes, packed_rows
from toolkit.run.hardware import free_memory
from toolkit.run.run import Run
from toolkit.train.expected_memory import ExpectedMemory, expected_memory
from toolkit.train.tasks.language_modeling import LanguageModeling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FEW_LAYERS = 4, 8
"""Layers that deeper models are extrapolated from; kinds of layers that alternate do so in a period that divides 4."""
TIMES_HELD = 2
"""Copies in memory of experts that are being read: as tensors of files, and as the rows made of them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Settings of fine-tuning that memory depends on."""

    ep_size: int
    """Expert-parallel group size. Non-expert parameters are replicated."""
    spare_slots: int = 0
    """Empty slots of each process, for replicas."""
    sequences: int
    """Sequences in a micro-batch of a process."""
    context: int
    """Tokens of a sequence."""
    dtype: torch.dtype = torch.bfloat16
    """Type of the model's weights."""
    quantize: Literal["4bit"] | None = None
    """Bits of frozen experts, as in `experts_in_files`."""
    offload: Literal["file", "host"] | None = None
    """Place of frozen experts: a file, which needs no memory; or main memory, with those of two layers on
    the GPU."""
    gradient_checkpointing: bool = False
    """Activation checkpointing."""


def fine_tuning_memory(
    config: PreTrainedConfig,
    layout: Layout,
    adapt: Callable[[Any], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> ExpectedMemory:
    """Return the memory of each process under an even load, with experts loaded by `experts_in_files`.

    Args:
        config: Of the model, as `AutoConfig.from_pretrained` returns it.
        layout: How the model is trained.
        adapt: Adds adapters, and returns the model that has them.
        build_optimizer: Called with the model. Default: AdamW.

    Raises:
        UserError: The model has no experts that can be sharded, or `use_toolkit_kernel()` does not compute them.

    Example:
        >>> layout = Layout(ep_size=8, sequences=1, context=4096)
        >>> adapt = partial(add_adapters, options=AdapterOptions())
        >>> fine_tuning_memory(AutoConfig.from_pretrained("Qwen/Qwen3-30B-A3B"), layout, adapt).total / 2**30
    """
    build = build_optimizer or (
        lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    )
    of_layers = partial(_expect, config, layout, adapt, build)
    few, more = FEW_LAYERS
    layers = config.num_hidden_layers
    if layers <= more:
        return of_layers(layers)
    one, other = of_layers(few), of_layers(more)
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
    """Return the memory of the first `layers` layers."""
    model = _rank_of_model(config, layout, adapt, layers)
    batch = {"tokens": torch.empty(layout.sequences, layout.context + 1, dtype=torch.int64, device="meta")}
    experts = experts_modules(model).values()
    loading, frozen = max(map(_loading_bytes, experts)), list(map(_frozen_bytes, experts))
    found = replace(expected_memory(model, LanguageModeling(), batch, build_optimizer), loading=loading)
    if layout.offload is None:
        return found
    weights = found.weights - sum(frozen)
    if layout.offload == "file":
        return replace(found, weights=weights)
    return replace(found, weights=weights + 2 * max(frozen), host=sum(frozen))


def _rank_of_model(
    config: PreTrainedConfig, layout: Layout, adapt: Callable[[Any], nn.Module], layers: int
) -> nn.Module:
    """Return the first `layers` layers on the meta device, with the number of experts that a rank has.

    The forward pass sends each token to as many of them as in the whole model, so under an even load it computes the
    rows of a rank.
    """
    with torch.device("meta"):
        model: Any = causal_lm(
            copy.deepcopy(config), dtype=layout.dtype, experts_implementation=use_toolkit_kernel()
        ).train()
        for module in model.modules():
            for name, child in module.named_children():
                if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
                    setattr(module, name, child[:layers])
        model.config.num_hidden_layers = layers
        for name, found in require_experts(model).items():
            if library_that_multiplies(found.module) is None:
                raise UserError(
                    f"model: use_toolkit_kernel() does not compute the experts at {name!r} "
                    f"({type(found.module).__name__}), so their memory cannot be estimated. Measure it."
                )
        if layout.gradient_checkpointing:
            recompute_blocks(model)
        model = adapt(model).train()
        for found in find_experts(model).values():
            experts: Any = found.module
            slots = -(-found.num_experts // layout.ep_size) + layout.spare_slots
            found.take_layout()
            for parameter, form in found.parameters().values():
                parameter.data = parameter.data.new_empty(slots, *found.rows(parameter, form).shape[1:])
            experts.num_experts = slots
            if layout.quantize is not None:
                give_packed_shapes(experts)
    return model


def _loading_bytes(module: nn.Module) -> int:
    """Return the bytes that reading the experts of a layer takes in addition to all rows."""
    slots, total = cast("int", module.num_experts), 0
    packed = packed_rows(module)
    for name, parameter in module.named_parameters(recurse=False):
        if name in packed:
            total += len(parameter) * packed[name].shape.numel() * packed[name].dtype.itemsize
        elif not name.endswith(SCALES):
            total += parameter.nbytes
    step = experts_at_a_time(total // slots)
    # Rows that are not read yet take no memory of a CPU. On a GPU they do, which is less than twice a part.
    beside = (TIMES_HELD * min(step, slots - begin) - (slots - begin) for begin in range(0, slots, step))
    return max(0, *beside) * total // slots


def _frozen_bytes(module: nn.Module) -> int:
    """Return the bytes of the frozen expert matrices of a layer, as they are kept."""
    library = library_that_multiplies(module)
    matrices = () if library is None else library.projections(module)
    return sum(
        parameter.nbytes
        for name, parameter in module.named_parameters(recurse=False)
        if name.removesuffix(SCALES) in matrices and not parameter.requires_grad
    )


def check_memory(
    run: Run,
    folder: str,
    layout: Layout,
    adapt: Callable[[Any], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    force: bool = False,
) -> None:
    """Print the memory that each process is expected to take, before the model in `folder` is loaded. A collective.

    Args:
        run: The run that trains the model.
        folder: The model, as `from_pretrained` takes it.
        layout: See `fine_tuning_memory`, as for the two that follow.
        force: Do not raise.

    Raises:
        UserError: If more is expected than is free.
    """

    def decide() -> str:
        expected = fine_tuning_memory(read_config(folder), layout, adapt, build_optimizer)
        needs = {"": (expected.total, run.device)}
        if layout.offload == "host":
            needs[" of the host's memory"] = expected.host, torch.device("cpu")
        found = []
        for of, (taken, device) in needs.items():
            here, there = taken / 2**30, free_memory(device, ranks_per_node(run.world_size)) / 2**30
            require(
                here <= there or force,
                "force",
                force,
                f"each process is expected to take {here:.1f} GiB{of} and has {there:.1f}: use more processes, "
                "quantize='4bit', gradient_checkpointing=True or smaller batches, or try with force=True",
            )
            found.append(f"{here:.2f} GiB{of} expected in each process, of {there:.1f} that are free")
        return f"memory      {'; '.join(found)}"

    run.print(run.on_main_and_share(decide))
