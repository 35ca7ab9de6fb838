"""Expected memory of each process that fine-tunes a transformers MoE model, from its configuration only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from toolkit.errors import UserError, require
from toolkit.experts.parallel.nodes import ranks_per_node
from toolkit.experts.placement.placement import MOST_EXPERTS
from toolkit.experts.sharding.find import experts_modules, find_experts, require_experts
from toolkit.experts.sharding.libraries import library_of
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

TIMES_HELD = 2
"""Copies in memory of experts that are being read: as tensors of files, and as the rows made of them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Settings of fine-tuning that memory depends on."""

    ep_size: int
    """Expert-parallel group size."""
    shards: int | None = None
    """Ranks of the expert data-parallel group, over which FSDP2 shards experts. It shards non-expert parameters over
    all ranks. Default: DDP, with replicas."""
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


class _Part(NamedTuple):
    """Bytes of a block, or of what is outside of the blocks, on a rank."""

    weights: float
    trained: float
    """Trainable part of `weights`."""
    experts: float
    """Expert matrices, which are not in `weights`."""
    trained_experts: float
    unpacked: float
    """Experts as they are in files."""
    activations: float
    """Kept by a block for its backward pass."""
    forward: float
    """The most that the step takes until the last block ends."""
    head: float
    """The most from there until the backward pass of the last block."""
    backward: float
    """The most after that."""


@dataclass(frozen=True)
class BlockMemory:
    """Memory of a model with one block of each kind, from which the memory of every layout follows."""

    experts: int
    """Experts of a layer."""
    kinds: list[int]
    """0, which is outside of the blocks, and the kind of each block from 1."""
    ends: tuple[list[_Part], list[_Part]]
    """The part outside of the blocks and each kind of block, with one slot per rank and with all."""
    states: float
    """Bytes of the optimizer's state per byte of trainable parameters."""

    def parts(self, slots: int) -> Any:
        """Return the parts of a rank with `slots`, whose bytes are linear in slots: (1 + kinds, fields of `_Part`)."""
        one, every = np.array(self.ends)
        return one + (every - one) * (slots - 1) / max(1, self.experts - 1)


def block_memory(
    config: PreTrainedConfig,
    layout: Layout,
    adapt: Callable[[Any], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> BlockMemory:
    """Return the memory of each kind of block, from a step of one block of each kind on fake tensors.

    `sequences`, `context`, `dtype` and `quantize` of `layout` are used. For the other arguments and errors, see
    `fine_tuning_memory`.
    """
    with torch.device("meta"):
        model: Any = causal_lm(copy.deepcopy(config), dtype=layout.dtype, experts_implementation=use_toolkit_kernel())
    experts = max(found.num_experts for found in require_experts(model).values())
    require(experts <= MOST_EXPERTS, "num_experts", experts, f"more than {MOST_EXPERTS:,} are not supported")
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    shapes = [[(name, p.shape) for name, p in block.named_parameters()] for block in _blocks(model)]
    kinds = list(zip(types, map(tuple, shapes), strict=True))
    first = {kind: kinds.index(kind) for kind in kinds}
    for each in [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == len(kinds)]:
        each._modules = nn.ModuleList(each[number] for number in first.values())._modules
    own_types = {"layer_types": [kind for kind, _ in first]} if getattr(config, "layer_types", None) else {}
    model.config.update({"num_hidden_layers": len(first)} | own_types)
    ends = []
    for ep_size in (experts, 1):
        rank = _rank_of_model(
            copy.deepcopy(model),
            replace(layout, ep_size=ep_size, spare_slots=0, gradient_checkpointing=False),
            adapt,
        )
        blocks = list(_blocks(rank))
        sizes = _sizes([rank, *blocks])
        found = expected_memory(rank, LanguageModeling(), _batch(layout), build_optimizer or _adamw, blocks)
        activations = [(0, *found.peaks), *((kept, 0, 0, 0) for kept in found.activations)]
        ends.append([_Part(*np.append(size, each)) for size, each in zip(sizes, activations, strict=True)])
    states = found.optimizer / sum(part.trained + part.trained_experts for part in ends[1])
    return BlockMemory(experts, [0, *(list(first).index(kind) + 1 for kind in kinds)], (ends[0], ends[1]), states)


def _sizes(parts: Sequence[nn.Module]) -> list[list[int]]:
    """Return the first five fields of `_Part` of a model without its blocks, and of its blocks."""
    model, *blocks = parts
    matrices = {p for module in experts_modules(model).values() for p in _expert_matrices(module)}
    inside = {tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    found = []
    for part in parts:
        own: set[Any] = {*part.parameters(), *part.buffers()} - (inside if part is model else set())
        trained = {tensor for tensor in own if tensor.requires_grad}
        chosen = own - matrices, trained - matrices, own & matrices, trained & matrices
        unpacked = max(map(_unpacked_bytes, experts_modules(part).values()), default=0)
        found.append([*(sum(tensor.nbytes for tensor in tensors) for tensors in chosen), unpacked])
    return found


def fine_tuning_memory(
    config: PreTrainedConfig,
    layout: Layout,
    adapt: Callable[[Any], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    *,
    blocks: BlockMemory | None = None,
) -> ExpectedMemory:
    """Return the memory of each process under an even load, with experts loaded by `experts_in_files`.

    Args:
        config: Of the model, as `AutoConfig.from_pretrained` returns it.
        layout: How the model is trained.
        adapt: Adds adapters, and returns the model that has them.
        build_optimizer: Called with the model. Default: AdamW.
        blocks: From `block_memory`, for several layouts. Default: from this layout.

    Raises:
        UserError: The model has no experts that can be sharded, or `use_toolkit_kernel()` does not compute them.

    Example:
        >>> layout = Layout(ep_size=8, sequences=1, context=4096)
        >>> adapt = partial(add_adapters, options=AdapterOptions())
        >>> fine_tuning_memory(AutoConfig.from_pretrained("Qwen/Qwen3-30B-A3B"), layout, adapt).total / 2**30
    """
    blocks = blocks or block_memory(config, layout, adapt, build_optimizer)
    shards, world = layout.shards or 1, layout.ep_size * layout.shards if layout.shards else 1
    slots = -(-blocks.experts // layout.ep_size) + layout.spare_slots
    parts = blocks.parts(slots)
    once, most = _Part(*parts.sum(axis=0)), _Part(*parts[1:].max(axis=0))
    whole, dense = (_Part(*each[blocks.kinds].sum(axis=0)) for each in (parts, blocks.parts(0)))
    # Adapters of experts are not sharded over the expert data-parallel group.
    weights = whole.weights - dense.weights * (1 - 1 / world) + whole.experts / shards
    gradients = whole.trained - dense.trained * (1 - 1 / world) + whole.trained_experts / shards
    # FSDP2 keeps what is outside of the blocks, and prefetches a block.
    block = most.weights * (world > 1) + most.experts * (shards > 1)
    gathered = parts[0][0] * (world > 1) + 2 * block
    # FSDP2 still has whole gradients of a block at the end of the backward pass.
    traced = 0 if world > 1 else once.trained + once.trained_experts
    forward, head, backward = (peak - once.activations for peak in (once.forward, once.head, once.backward))
    layers = len(blocks.kinds) - 1
    hidden = layout.sequences * layout.context * config.hidden_size * layout.dtype.itemsize
    # Trained experts keep the rows of the tokens that visit their rank. The backward pass of a block also has gradients
    # of their outputs, and gradients of rows, packed and on their way back. `exact_memory` leaves them out.
    others = 1 - 1 / layout.ep_size
    visits = layout.ep_size * (1 - others ** getattr(config, "num_experts_per_tok", 1)) if others else 0
    received = hidden * visits * (whole.trained_experts > 0) * (world > 1)
    of_block = most.activations + 4 * received
    all_kept = whole.activations + layers * received
    kept, recomputed = (layers * hidden, of_block) if layout.gradient_checkpointing else (all_kept, 0)
    # The backward pass begins, is at the second block, and is at the first block, which prefetches none.
    left = min(1, 2 / layers)
    peaks = (
        kept + max(head, recomputed + max(forward, backward)),
        left * kept + (1 - left) * gradients + recomputed + backward - traced,
        gradients + of_block + backward - traced - block,
    )
    frozen, offloaded = whole.experts * (not whole.trained_experts), layout.offload is not None
    on_host = frozen * (layout.offload == "host")
    weights += 2 * most.experts * (on_host > 0) - frozen * offloaded
    loading = _loading_bytes(round(most.unpacked), slots)
    found = [weights, gradients * blocks.states, max(peaks) + gathered, loading, on_host, gradients, gathered]
    return replace(ExpectedMemory(*map(round, found)), activations=(round(kept),))


def exact_memory(
    config: PreTrainedConfig,
    layout: Layout,
    adapt: Callable[[Any], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> ExpectedMemory:
    """Return the weights, optimizer state and step of all layers, without offload, from a step on fake tensors.

    For the arguments and errors, see `fine_tuning_memory`. FSDP2 is not supported.
    """
    with torch.device("meta"):
        model = causal_lm(copy.deepcopy(config), dtype=layout.dtype, experts_implementation=use_toolkit_kernel())
    return expected_memory(
        _rank_of_model(model, layout, adapt), LanguageModeling(), _batch(layout), build_optimizer or _adamw
    )


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def _batch(layout: Layout) -> dict[str, torch.Tensor]:
    return {"tokens": torch.empty(layout.sequences, layout.context + 1, dtype=torch.int64, device="meta")}


def _blocks(model: Any) -> nn.ModuleList:
    """Return the list of blocks."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next(module for module in lists if len(module) == model.config.num_hidden_layers)


def _rank_of_model(model: Any, layout: Layout, adapt: Callable[[Any], nn.Module]) -> Any:
    """Return a model on the meta device with adapters and with the number of experts that a rank has.

    The forward pass sends each token to as many of them as in the whole model, so under an even load it computes the
    rows of a rank.
    """
    for name, found in require_experts(model).items():
        if not library_of(found.module).projections(found.module):
            raise UserError(
                f"model: use_toolkit_kernel() does not compute the experts at {name!r} "
                f"({type(found.module).__name__}), so their memory cannot be estimated. Measure it."
            )
    with torch.device("meta"):
        if layout.gradient_checkpointing:
            recompute_blocks(model.train())
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


def _unpacked_bytes(module: nn.Module) -> int:
    """Return the bytes of the experts of a layer as they are in files."""
    packed = packed_rows(module)
    return sum(
        len(parameter) * packed[name].shape.numel() * packed[name].dtype.itemsize
        if name in packed
        else parameter.nbytes
        for name, parameter in module.named_parameters(recurse=False)
        if not name.endswith(SCALES)
    )


def _loading_bytes(total: int, slots: int) -> int:
    """Return the bytes that reading `total` bytes of experts of a layer takes in addition to all rows."""
    step = experts_at_a_time(total // slots)
    # Rows that are not read yet take no memory of a CPU. On a GPU they do, which is less than twice a part.
    beside = (TIMES_HELD * min(step, slots - begin) - (slots - begin) for begin in range(0, slots, step))
    return max(0, *beside) * total // slots


def _expert_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the expert matrices of a layer, as they are kept."""
    names = library_of(module).projections(module)
    return [p for name, p in module.named_parameters(recurse=False) if name.removesuffix(SCALES) in names]


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
