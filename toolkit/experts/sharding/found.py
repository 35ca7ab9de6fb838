"""Experts of a layer as `find_experts` finds them. Only `take_layout` and `shard` change the model."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.rows_in_files import RowsInFiles, stacked
from toolkit.experts.layer.stack import ExpertLayer, ExpertStack, hook_state_dict, rows_of
from toolkit.experts.parallel.collectives import broadcast_from_main, together
from toolkit.experts.parallel.ddp import leave_out_of_every_ddp
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.sharding.adapt import KnownLayout
from toolkit.experts.sharding.layout import CalledByIds, Layout, extend, extended
from toolkit.experts.sharding.libraries import library_of
from toolkit.experts.sharding.sharded_experts import LazyExperts, ShardedExperts, forward_arguments, own_type

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    import torch

    from toolkit.experts.parallel.groups import ExpertGroups
    from toolkit.experts.sharding.libraries import Adapters

OF_ONE_LAYER = ("layer_idx", "read_rows")
"""Attributes in which layers of one kind differ."""

Parameters = dict[str, tuple[nn.Parameter, RowsInFiles]]
"""The parameters of experts by name, adapters included, and how files have their rows."""


class FoundExperts:
    """An experts module of another library.

    Args:
        name: Of the module in its model.
        module: Its own parameters have the rows of the experts, or of this rank's slots.
        known: The layout of a module that is not called with ids.
        adapters: Of the module's parameters.
    """

    router: nn.Module | None = None
    """The router, if the layer has it."""

    def __init__(self, name: str, module: nn.Module, known: KnownLayout | None, adapters: Adapters | None):
        self.name, self.module, self.known, self.adapters = name, module, known, adapters
        self.is_sharded = isinstance(module, ShardedExperts)
        self.layout: type[Layout] | None = None
        """Mixed into the module's class before it is sharded, if it has no layout yet."""
        if not isinstance(module, Layout):
            self.layout = (known or library_of(module)).layout or CalledByIds
        self.weights_first = False
        """Whether the module is called with weights before ids, as the trial finds out."""
        counted: Any = module.expert_stack if isinstance(module, ShardedExperts) else known or module
        self.num_experts: int = counted.num_experts

    @property
    def path(self) -> str:
        """The name of the module that has all parameters of the experts, adapters included."""
        return outside_wrappers(self.name)

    @property
    def stack(self) -> ExpertStack:
        """The rows of this rank's slots, once the experts are sharded."""
        assert isinstance(self.module, ExpertLayer)
        return self.module.expert_stack

    @property
    def type_with_layout(self) -> type[Any]:
        """The class of the module with its layout, and without the mixin of lazy loading."""
        own = own_type(self.module)
        return own if self.layout is None else extended(own, self.layout)

    @property
    def is_tried(self) -> bool:
        """Whether a trial has to show that the experts compute the same when they are sharded: unless they are
        quantised."""
        first = next(self.module.parameters(recurse=False))
        return first.is_floating_point() and first.itemsize > 1

    @property
    def kind(self) -> Hashable:
        """Class, settings, shapes and types, which are equal for layers of one kind."""
        module = self.module
        tensors = (*module.named_parameters(), *module.named_buffers())
        settings = (
            (name, value if isinstance(value, bool | int | float | str) else id(value))
            for name, value in vars(module).items()
            if not name.startswith("_") and name not in OF_ONE_LAYER
        )
        shapes = ((name, value.shape, value.dtype, value.device) for name, value in tensors)
        children = (type(child) for child in module.modules())
        return self.type_with_layout, *settings, *shapes, *children

    @property
    def takes_ids(self) -> bool:
        """Whether the module is called with (hidden, expert ids, weights) once it has its layout."""
        taken = forward_arguments(self.module)
        required = [p for p in taken if p.default is p.empty]  # gpt-oss has defaults for two of the three
        return self.is_sharded or self.known is not None or len(required) <= 3 <= len(taken)

    def parameters(self) -> Parameters:
        """Return the parameters of all experts, or of this rank's slots once they are sharded."""
        if self.is_sharded:
            return _parameters_of(self.stack)
        layout: Any = self.module if isinstance(self.module, Layout) else self.layout
        found: Parameters = {n: (p, layout.rows_in_files) for n, p in self.module.named_parameters(recurse=False)}
        return found | (self.adapters.parameters if self.adapters is not None else {})

    @property
    def shared_parameter(self) -> str | None:
        """The first trainable parameter of a module inside of the experts module, or None."""
        return next((n for n, p in self.module.named_parameters() if "." in n and p.requires_grad), None)

    def tables(self) -> dict[str, Tensor]:
        """Return the data of the module's own parameters as rows (E, ...), before they are sharded."""
        own = {name for name, _ in self.module.named_parameters(recurse=False)}
        return {n: self.rows(p.detach(), form) for n, (p, form) in self.parameters().items() if n in own}

    def rows(self, value: Tensor, form: RowsInFiles) -> Tensor:
        """Return the data of a parameter of all experts as rows (E, ...)."""
        return stacked(value, form, self.num_experts) if value.ndim == 2 else value

    def fit(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Return `placement` with an empty slot on each rank without one.

        Such a rank could not call the module, and would lack the backward pass of the all-to-all.
        """
        return ExpertPlacement(tuple(row or (EMPTY_ROW,) for row in placement.slots))

    def take_layout(self) -> None:
        """Mix the layout into the module's class, and have adapters compute with rows."""
        module: Any = self.module
        module.__class__ = self.type_with_layout
        if self.known is not None:
            module.num_experts = self.num_experts
            extend(self.known.block, self.known.block_type)
        if self.weights_first:
            module.weights_first = True
        if self.adapters is not None:
            self.adapters.use_rows(self.num_experts)

    def shard(self, placement: ExpertPlacement, groups: ExpertGroups) -> None:
        """Leave the layer the rows of this rank's slots. A collective."""
        module: Any = self.module
        slots, read = placement.slots[groups.ep_rank], dict[str, Tensor]()
        is_lazy = isinstance(module, LazyExperts)
        self.take_layout()
        module.first_three = inspect.Signature(forward_arguments(module)[:3])  # of the forward that is hidden next
        extend(module, ShardedExperts)
        if is_lazy:
            together(lambda: read.update(module.read_rows(module, slots)))
            del module.read_rows
        parameters = self.parameters()
        for name, (parameter, form) in parameters.items():
            if name not in read:
                self._keep_rows(parameter, form, slots)
            elif read[name].device == parameter.device:
                parameter.data = read[name]
            else:
                parameters[name] = nn.Parameter(read[name], requires_grad=False), form
                setattr(module, name, parameters[name][0])
        module.expert_stack = _stack_of(parameters, placement, groups, module.computed_on)
        hook_state_dict(module)
        if constant := [name for name in read if not module.get_parameter(name).requires_grad]:
            module.constant_buffers = constant
            leave_out_of_every_ddp()

    def _keep_rows(self, parameter: nn.Parameter, form: RowsInFiles, slots: tuple[int, ...]) -> None:
        broadcast_from_main(parameter.data)
        parameter.data = rows_of(self.rows(parameter.data, form), slots)


class FoundMoE(FoundExperts):
    """Our `MoE`, whose `experts` have the parameters."""

    is_tried = False
    shared_parameter = None
    takes_ids = True

    def __init__(self, name: str, layer: MoE, adapters: Adapters | None):
        self.name, self.module, self.adapters, self.layer, self.router = name, layer, adapters, layer, layer.router
        self.is_sharded = layer.expert_stack.groups.ep_size > 1
        self.num_experts = layer.expert_stack.num_experts

    @property
    def path(self) -> str:
        return f"{self.name}.experts"

    def parameters(self) -> Parameters:
        return _parameters_of(self.stack)

    def fit(self, placement: ExpertPlacement) -> ExpertPlacement:
        return placement

    def shard(self, placement: ExpertPlacement, groups: ExpertGroups) -> None:
        parameters = self.parameters()
        for parameter, form in parameters.values():
            self._keep_rows(parameter, form, placement.slots[groups.ep_rank])
        self.layer.expert_stack = _stack_of(parameters, placement, groups)


def is_stacked(module: nn.Module) -> bool:
    """Whether `module` is sharded, or each of its own parameters has one row per expert."""
    experts, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    has_rows = isinstance(experts, int) and all(p.ndim >= 2 and p.shape[0] == experts for p in parameters)
    return isinstance(module, ShardedExperts) or (bool(parameters) and has_rows)


def outside_wrappers(name: str) -> str:
    """Return the name of the outermost wrapper that has the module `name` as its `base_layer`, or `name` itself."""
    return re.sub(r"(\.base_layer)+$", "", name)


def _parameters_of(stack: ExpertStack) -> Parameters:
    return {name: (parameter, stack.in_files(name)) for name, parameter in stack.parameters.items()}


def _stack_of(
    parameters: Parameters,
    placement: ExpertPlacement,
    groups: ExpertGroups,
    computed_on: Mapping[str, torch.device] | None = None,
) -> ExpertStack:
    in_files = {name: form for name, (_, form) in parameters.items()}
    rows = {name: parameter for name, (parameter, _) in parameters.items()}
    return ExpertStack(rows, placement, groups, in_files=in_files, computed_on=computed_on)
