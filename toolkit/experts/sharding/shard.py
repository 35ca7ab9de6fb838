"""Experts of any model sharded over ranks: each rank keeps the rows of its own, and tokens are dispatched to them.

Found are our `MoE` layers, and foreign modules of the form that `toolkit.experts.sharding.foreign` describes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.stack import ExpertStack, expert_stacks, hook_state, rows_of
from toolkit.experts.parallel.collectives import is_main
from toolkit.experts.parallel.dense import leave_out_of_ddp
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import RowsInFiles
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, initial_placement, with_spare_slots
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.sharding.adapted_experts import (
    PAGE,
    adapt_experts,
    is_fused_part,
    lists_of_experts,
    why_no_experts,
)
from toolkit.experts.sharding.contract import check_experts
from toolkit.experts.sharding.foreign import layers_with_experts, num_experts, run_experts
from toolkit.experts.sharding.host_memory import stay_on_host
from toolkit.experts.sharding.libraries import libraries
from toolkit.experts.sharding.waiting_rows import rows_from_files

PlacementOf = Callable[[str, int, int], ExpertPlacement]
"""`(layer, number of experts, ep_size)` to the layer's initial placement."""


def shard_experts(
    model: nn.Module,
    groups: ExpertGroups,
    *,
    spare_slots: int = 0,
    placement: InitialPlacement | PlacementOf = "contiguous",
) -> dict[str, ExpertStack]:
    """Keeps this rank's experts of each layer of `model`, in place. A collective where they are still in files.

    Args:
        model: The same on all ranks. An optimizer that was made before stays valid if it has not stepped.
        groups: The ranks that share the experts.
        spare_slots: Empty slots on each rank, for replicas.
        placement: Contiguous blocks of ids, round-robin, or a function of the layer. A foreign module gets an empty
            slot on a rank that it leaves without any.

    Returns:
        The stack of each layer, by its name.

    Raises:
        UserError: For a model without experts, for a placement that does not fit a layer, and for experts that would
            compute something else once they are spread. On every rank alike for files of which one can read no rows.
    """
    layers = require_experts(model)
    _refuse_what_is_spread(layers)
    for name, module in layers.items():
        if not isinstance(module, MoE):
            _check_in_some_order(name, module)
    for name, module in lists_of_experts(model) if is_main() else ():
        warnings.warn(
            f"the experts at {name!r} are a {type(module).__name__}, so every rank keeps all of them: stack_experts "
            f"makes them rows that are spread, see {PAGE}.",
            stacklevel=2,
        )
    for library in libraries():
        library.stack_adapters(model, layers.values())
    equal: list[str] = []
    for name, module in layers.items():
        experts, ranks = num_experts(module), groups.ep_size
        if isinstance(placement, str):
            place = initial_placement(experts, ranks, placement, spare_slots=spare_slots)
        else:
            place = with_spare_slots(placement(name, experts, ranks), spare_slots)
        if place.num_experts != experts:
            raise UserError(f"placement of {place.num_experts} experts for {name!r}, which has {experts}.")
        if not isinstance(module, MoE):
            # A rank without a slot could not call the module, and would be missing in the backward of the exchange.
            place = ExpertPlacement(tuple(row or (EMPTY_ROW,) for row in place.slots))
        here = place.slots[groups.ep_rank]
        read = rows_from_files(module, here)
        equal += [f"{name}.{key}" for key in read if not module.get_parameter(key).requires_grad]
        parameters, in_files = stacked_parameters(module)
        device = next(iter(parameters.values())).device
        for key, parameter in parameters.items():
            rows = read[key] if key in read else rows_of(parameter.data, here)
            if rows.device == parameter.device:
                parameter.data = rows
            else:
                parameters[key] = nn.Parameter(rows, requires_grad=False)
                setattr(module, key, parameters[key])
        module.expert_stack = ExpertStack(parameters, place, groups, in_files=in_files)  # type: ignore[assignment]
        if not isinstance(module, MoE):
            _dispatch_tokens(module, module.expert_stack)  # type: ignore[arg-type]
            hook_state(module)
    stay_on_host(list(layers.values()), device)
    leave_out_of_ddp(model, equal)
    return expert_stacks(model)


def require_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with experts that can be spread, by name: our `MoE`, and foreign modules of stacked experts,
    which are given the interface of `toolkit.experts.sharding.foreign`. Raises UserError where there is none."""
    adapt_experts(model)
    layers = {name: module for name, module in layers_with_experts(model) if _can_be_spread(module)}
    if not layers:
        raise UserError(why_no_experts(model))
    return layers


def _check_in_some_order(name: str, module: nn.Module) -> None:
    """Check that `module` can be spread, and have its forward take (hidden, expert ids, weights), in this order, where
    its own has weights before ids."""
    own = module.forward
    try:
        check_experts(name, module)
    except UserError:
        swapped: Any = partial(_weights_first, own)
        swapped.__signature__ = inspect.signature(own)
        module.forward = swapped
        try:
            check_experts(name, module)
        except UserError:
            module.forward = own
        else:
            return
        raise


def _weights_first(forward: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return forward(hidden, weights, ids)


def _can_be_spread(module: nn.Module) -> bool:
    if isinstance(module, MoE) or "expert_stack" in vars(module):
        return True
    taken = inspect.signature(module.forward).parameters.values()
    required = [p for p in taken if p.default is p.empty]  # gpt-oss has defaults for two of the three
    return len(required) <= 3 <= len(taken)


def stacked_parameters(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, RowsInFiles]]:
    """Returns the parameters of a layer's experts by name, and how files have those that are not stacked there."""
    holder = module.experts if isinstance(module, MoE) else module
    parameters = dict(holder.named_parameters(recurse=False))
    in_files: dict[str, RowsInFiles] = dict.fromkeys(parameters, "joined") if is_fused_part(holder) else {}
    for library in libraries():
        for name, (parameter, form) in library.adapter_rows(holder).items():
            parameters[name], in_files[name] = parameter, form
    return parameters, in_files


def _refuse_what_is_spread(layers: Mapping[str, nn.Module]) -> None:
    """Rows that were taken once must not be taken again."""
    layer_of: dict[int, str] = {}
    for name, module in layers.items():
        if isinstance(module, MoE):
            is_spread = module.expert_stack.groups.ep_size > 1
        else:
            is_spread = "expert_stack" in vars(module)
        if is_spread:
            raise UserError(f"the experts at {name!r} are spread over ranks already: prepare a model that is not.")
        for parameter in stacked_parameters(module)[0].values():
            first = layer_of.setdefault(id(parameter), name)
            if first != name:
                raise UserError(
                    f"the experts at {first!r} and {name!r} share parameters, and each layer places its own: "
                    "use one module in both places, or parameters for each."
                )


def _dispatch_tokens(module: nn.Module, stack: ExpertStack) -> None:
    """Wrap the forward of a foreign module: it gets the rows dispatched to its slots, each with weight 1."""
    names = tuple(inspect.signature(module.forward).parameters)[:3]
    module.num_experts = stack.slots  # type: ignore[assignment]
    # No closure: `copy.deepcopy` gives a copied module its own forward, which has it and its stack.
    module.forward = partial(_forward, module, stack, module.forward, names)


def _forward(
    module: nn.Module,
    stack: ExpertStack,
    compute: Callable[..., Tensor],
    names: tuple[str, ...],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """`names`: of the arguments hidden, ids and weights, of which the last two may come in either order."""
    if len(args) + len(kwargs) > len(names):
        raise UserError(
            f"the experts {type(module).__name__} were called with more than {', '.join(names)}, which ranks that "
            "compute them for others are not told: make it an attribute of the module, or apply it outside."
        )
    hidden, ids_TK, weights_TK = (*args, *(kwargs[name] for name in names[len(args) :]))
    if ids_TK.is_floating_point():
        ids_TK, weights_TK = weights_TK, ids_TK
    x_TD = hidden.reshape(-1, hidden.shape[-1])
    return run_experts(module, stack, compute, x_TD, ids_TK, weights_TK).view(hidden.shape)
