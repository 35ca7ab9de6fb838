"""Experts of any model sharded over ranks: each rank keeps the rows of its own, and tokens are dispatched to them.

Found are our `MoE` layers, and foreign modules of the form that `toolkit.experts.hosts.spreading.foreign` describes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.hosts.peft.adapters import adapter_rows, stack_adapters
from toolkit.experts.hosts.spreading.adapters import adapt_experts
from toolkit.experts.hosts.spreading.contract import check_experts
from toolkit.experts.hosts.spreading.foreign import has_stacked_parameters, num_experts, run_experts
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.stack import ExpertStack, expert_stacks
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import EMPTY_ROW
from toolkit.experts.placement.placement import ExpertPlacement, initial_placement, with_spare_slots
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.state.state_dict import refuse_partial_state_dict, rows_of, take_rows

PlacementOf = Callable[[str, int, int], ExpertPlacement]
"""`(layer, number of experts, ep_size)` to the layer's initial placement."""


def spread_experts(
    model: nn.Module,
    groups: ExpertGroups,
    *,
    spare_slots: int = 0,
    placement: InitialPlacement | PlacementOf = "contiguous",
) -> dict[str, ExpertStack]:
    """Keep this rank's experts of each layer of `model`, in place; returns all layers' stacks, by name.

    All ranks hold the same `model`; an optimizer made before stays valid if it has not stepped. `placement`: contiguous
    blocks of ids, round-robin, or a function of the layer; a foreign module gets an empty slot on a rank that it leaves
    without any. Raises UserError for one that does not fit a layer, and for experts that would compute something else
    once they are spread.
    """
    adapt_experts(model)
    layers = find_experts(model)
    _refuse_what_is_spread(layers)
    for name, module in layers.items():
        if not isinstance(module, MoE):
            check_experts(name, module)
    stack_adapters(model, layers.values())
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
        parameters = _stacked_parameters(module)
        for parameter in parameters.values():
            parameter.data = rows_of(parameter.data, place.slots[groups.ep_rank])
        module.expert_stack = ExpertStack(parameters, place, groups)  # type: ignore[assignment]
        if not isinstance(module, MoE):
            _dispatch_tokens(module, module.expert_stack)  # type: ignore[arg-type]
            module.register_state_dict_pre_hook(refuse_partial_state_dict)
            module.register_load_state_dict_pre_hook(take_rows)
    return expert_stacks(model)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with experts that can be sharded, by name: our `MoE`, and foreign modules of stacked experts."""
    layers: dict[str, nn.Module] = {}
    ours: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            ours.append(f"{name}." if name else "")
            layers[name] = module
        elif not any(name.startswith(prefix) for prefix in ours) and _holds_stacked_experts(module):
            layers[name] = module
    return layers


def refuse_spread_by_transformers(model: nn.Module) -> None:
    """Raise UserError for a model, with adapters or without, that was loaded into transformers' expert parallelism."""
    for name, module in model.named_modules():
        counts = isinstance(getattr(module, "num_experts", None), int)
        if counts and any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            raise UserError(
                f"the experts at {name!r} were loaded with a DistributedConfig, which has spread them, and not their "
                "adapters: load the model without, because ExpertParallel spreads both."
            )


def _stacked_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    holder = module.experts if isinstance(module, MoE) else module
    return dict(holder.named_parameters(recurse=False)) | adapter_rows(holder)


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
        for parameter in _stacked_parameters(module).values():
            first = layer_of.setdefault(id(parameter), name)
            if first != name:
                raise UserError(
                    f"the experts at {first!r} and {name!r} share parameters, and each layer places its own: "
                    "use one module in both places, or parameters for each."
                )


def _holds_stacked_experts(module: nn.Module) -> bool:
    if "expert_stack" in vars(module):
        return True
    taken = inspect.signature(module.forward).parameters.values()
    required = [p for p in taken if p.default is p.empty]  # gpt-oss has defaults for two of the three
    return has_stacked_parameters(module) and len(required) <= 3 <= len(taken)


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
    """`names`: of the arguments hidden, ids and weights."""
    if len(args) + len(kwargs) > len(names):
        _refuse_further_arguments(type(module).__name__, compute, names, args, kwargs)
    hidden, ids_TK, weights_TK = (*args[:3], *(kwargs[name] for name in names[len(args) :]))
    x_TD = hidden.reshape(-1, hidden.shape[-1])
    return run_experts(module, stack, compute, x_TD, ids_TK, weights_TK).view(hidden.shape)


def _refuse_further_arguments(
    kind: str, compute: Callable[..., Tensor], names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise UserError for an argument besides those of `names`, unless it is what it would be without being given."""
    taken = inspect.signature(compute).parameters
    for name, value in (*zip(list(taken)[3:], args[3:], strict=False), *kwargs.items()):
        is_default = name in taken and not isinstance(value, Tensor) and value == taken[name].default
        if name not in names and not is_default:
            raise UserError(
                f"the experts {kind} were called with {name!r}, which ranks that compute them for others are not told: "
                "make it an attribute of the module, or apply it outside."
            )
