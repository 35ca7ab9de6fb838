"""A mixture as one rank has it once its experts are spread, without values: what memory is foreseen from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.experts.sharding.experts_modules import experts_modules
from toolkit.experts.sharding.libraries import libraries, library_that_multiplies
from toolkit.experts.sharding.shard import require_experts, stacked_parameters
from toolkit.integrations.transformers.experts_in_files import experts_at_a_time
from toolkit.integrations.transformers.four_bits import SCALES, Packed, give_packed_shapes
from toolkit.integrations.transformers.kernel import use_toolkit_kernel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def rank_skeleton(
    config: PreTrainedConfig,
    *,
    ep_size: int = 1,
    spare_slots: int = 0,
    dtype: torch.dtype = torch.float32,
    quantize: Literal["4bit"] | None = None,
    adapt: Callable[[Any], nn.Module] | None = None,
    layers: int | None = None,
) -> nn.Module:
    """Return a causal language model on torch's device `meta`, with as many experts as a rank of `ep_size` has.

    Its forward sends each token to as many of them as the whole model would, so under an even load it computes as many
    rows as a rank does.

    Args:
        config: What `AutoConfig.from_pretrained` returns.
        ep_size: The ranks that share the experts; where they are no multiple, of a rank with one more.
        spare_slots: Of each rank.
        dtype: Of the parameters.
        quantize: As in `experts_in_files`.
        adapt: Adds adapters, and returns the model that has them.
        layers: Keeps as many, the first ones; None keeps all.

    Raises:
        UserError: The model has no experts that can be spread, or its experts are not computed by
            `use_toolkit_kernel()`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, experts_implementation=use_toolkit_kernel()
        )
        if layers is not None:
            _keep_layers(built, layers)
        experts = require_experts(built)
        for name, module in experts.items():
            if library_that_multiplies(module) is None:
                raise UserError(
                    f"the experts at {name!r} ({type(module).__name__}) are not computed by use_toolkit_kernel(), "
                    "and the memory of others cannot be foreseen: measure it."
                )
        model = built if adapt is None else adapt(built)
        for library in libraries():
            library.stack_adapters(model, experts.values())
        for module in experts.values():
            _keep_rows(module, -(-cast("int", module.num_experts) // ep_size) + spare_slots)
        if quantize is not None:
            for module in experts.values():
                give_packed_shapes(module)
    return model.train()


def _keep_layers(model: PreTrainedModel, layers: int) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers:
                setattr(module, name, child[:layers])
    model.config.num_hidden_layers = layers


def _keep_rows(module: nn.Module, rows: int) -> None:
    for parameter in stacked_parameters(module)[0].values():
        parameter.data = parameter.data.new_empty(rows, *parameter.shape[1:])
    module.num_experts = rows  # type: ignore[assignment]


TIMES_HELD = 2
"""How often experts that are being read are in memory: as tensors of files, and as rows that are made of them."""


def bytes_to_read(skeleton: nn.Module) -> int:
    """Return the bytes that reading experts takes beside all rows, of the layer whose experts are largest."""
    return max(map(_bytes_beside_rows, experts_modules(skeleton).values()))


def _bytes_beside_rows(module: nn.Module) -> int:
    rows, total = cast("int", module.num_experts), sum(_bytes_in_files(module))
    step = experts_at_a_time(total // rows)
    # Rows that are not read yet take no memory of a CPU yet. On a GPU they do, which is less than twice a part.
    beside = (TIMES_HELD * min(step, rows - begin) - (rows - begin) for begin in range(0, rows, step))
    return max(0, *beside) * total // rows


def frozen_bytes(skeleton: nn.Module) -> list[int]:
    """Return the bytes of the frozen matrices of experts of each layer, as they are kept."""
    return [
        sum(
            parameter.nbytes
            for name, parameter in module.named_parameters(recurse=False)
            if name.removesuffix(SCALES) in library.projections(module) and not parameter.requires_grad
        )
        for module in experts_modules(skeleton).values()
        if (library := library_that_multiplies(module)) is not None
    ]


def _bytes_in_files(module: nn.Module) -> Iterator[int]:
    packed: dict[str, Packed] = getattr(module, "packed", {})
    for name, parameter in module.named_parameters(recurse=False):
        if name in packed:
            yield len(parameter) * packed[name].shape.numel() * packed[name].dtype.itemsize
        elif not name.endswith(SCALES):
            yield parameter.nbytes
