"""Low-rank adapters of stacked experts, from PEFT's `target_parameters`, as rows of their experts.

PEFT keeps A as (experts * r, in), expert by expert, and B as (out, r * experts) with the expert as the fastest index.
Here both are stacked, A as (slots, r, in) and B as (slots, out, r), in PEFT's parameters and under their names, so that
an optimizer stays valid. Their layer's `ExpertStack` holds them, and treats them as further rows of each expert.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.stack import RowsInFiles, rows_of, stacked
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.sharding.call import LowRank
from toolkit.experts.sharding.libraries import Library, library_that_multiplies
from toolkit.integrations.peft.layouts import IN_FILES
from toolkit.integrations.peft.record import describe_adapters, write_records


class PeftLibrary(Library):
    """Adapters of stacked experts: `toolkit.integrations` registers it."""

    def stack_adapters(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Turn PEFT's adapters of the experts modules `layers` of `model` into rows, one for each expert, in place.

        Other adapters stay as they are.

        Raises:
            UserError: An adapter is not of a matrix that the experts are known to multiply by. Nothing was changed.
        """
        found = _wrappers_of(model, layers)
        for name, wrapper in found.items():
            _refuse(name, wrapper)
        for wrapper in found.values():
            experts: Any = wrapper.get_base_layer()
            if "adapters" not in vars(experts):
                experts.adapters, experts.low_rank = {}, {}
                experts.forward = _with_adapters(experts)
            wrapper.__class__ = ParamWrapper
            experts.adapters[wrapper.parameter_name] = wrapper
            for adapter in wrapper.lora_A:
                for matrix, form in IN_FILES.items():
                    _stack(getattr(wrapper, matrix)[adapter], form, int(experts.num_experts))

    def adapter_rows(self, experts: nn.Module) -> dict[str, tuple[nn.Parameter, RowsInFiles]]:
        wrappers: dict[str, ParamWrapper] = vars(experts).get("adapters", {})
        return {
            f"{parameter}.{matrix}.{adapter}": (layer.weight, form)
            for parameter, wrapper in wrappers.items()
            for matrix, form in IN_FILES.items()
            for adapter, layer in getattr(wrapper, matrix).items()
        }

    def record(self, model: nn.Module) -> Callable[[Path], None] | None:
        return partial(write_records, describe_adapters(model)) if hasattr(model, "peft_config") else None


def _refuse(name: str, wrapper: Any) -> None:
    experts, parameter = wrapper.get_base_layer(), wrapper.parameter_name
    library = library_that_multiplies(experts)
    known = () if library is None else library.projections(experts)
    if parameter not in known:
        raise UserError(
            f"target_parameters: adapters of {parameter!r} of the experts at {name!r} ({type(experts).__name__}) are "
            f"not supported. Adapt {' or '.join(known) or 'attention, because how they multiply is not known'}."
        )


def _with_adapters(experts: Any) -> Any:
    """Return the forward of `experts`, with the low-rank products of adapters in use during the call."""
    signature = inspect.signature(experts.forward)
    # No closure: `copy.deepcopy` gives copied experts their own.
    forward: Any = partial(_forward, experts, experts.forward, signature)
    forward.__signature__ = signature
    return forward


def _forward(experts: Any, forward: Any, signature: inspect.Signature, *args: Any, **kwargs: Any) -> Tensor:
    if not experts.low_rank:
        return forward(*args, **kwargs)
    library = library_that_multiplies(experts)
    assert library is not None  # of `_refuse`
    return library.forward_with_adapters(experts, *signature.bind(*args, **kwargs).args)


class ParamWrapper(lora.ParamWrapper):  # PEFT asks for this name
    """PEFT's wrapper with A as (slots, r, in) and B as (slots, out, r).

    PEFT folds the product of both into a new weight on every forward, and computes that weight's gradient. This one
    hands A and B to the experts for the time of their forward. Merging, disabling and choosing adapters are PEFT's.
    """

    # Attributes of PEFT's modules, unknown to torch's types.
    base_layer: Any
    get_base_layer: Any
    lora_A: Any
    lora_B: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return self.base_layer(x, *args, **kwargs)
        experts = self.get_base_layer()
        used = [self._factors(name) for name in self.active_adapters if name in self.lora_A]
        experts.low_rank[self.parameter_name] = used
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            del experts.low_rank[self.parameter_name]

    def _factors(self, adapter: str) -> LowRank:
        return LowRank(self.lora_A[adapter].weight, self.lora_B[adapter].weight, self.scaling[adapter])

    def get_delta_weight(self, adapter_name: str, *_: Any, **__: Any) -> Tensor:
        """Return the adapter's delta of its parameter's rows on this rank, for PEFT to merge."""
        a_SRI, b_SOR, scaling = self._factors(adapter_name)
        delta_SOI = torch.bmm(b_SOR, a_SRI) * scaling
        return (delta_SOI.transpose(1, 2) if self.get_base_layer().is_transposed else delta_SOI).to(self.get_param())

    def update_layer(self, adapter_name: str, *_: Any, **__: Any) -> None:
        raise UserError(f"adapter {adapter_name!r}: added after the experts were sharded. Add it before prepare.")


def _wrappers_of(model: nn.Module, experts: Iterable[nn.Module]) -> dict[str, lora.ParamWrapper]:
    """Return PEFT's wrappers of parameters of the modules `experts` that are not rows yet, by name."""
    holders = [getattr(module, "experts", module) for module in experts]  # our own layers hold their experts
    ids = {id(holder.get_base_layer() if isinstance(holder, lora.ParamWrapper) else holder) for holder in holders}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is lora.ParamWrapper and id(module.get_base_layer()) in ids
    }


def _stack(layer: Any, form: RowsInFiles, experts: int) -> None:
    """Give the weight of a PEFT layer a row per expert, in place; weights that are loaded in PEFT's layout are
    stacked, too."""
    layer.weight.data = stacked(layer.weight.data, form, experts)
    layer.register_load_state_dict_pre_hook(partial(_take_rows, form, experts))


def _take_rows(form: RowsInFiles, experts: int, layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    saved, ownership = state.get(f"{prefix}weight"), ownership_of(layer.weight)  # type: ignore[arg-type]
    if saved is not None and saved.ndim == 2 and ownership is not None:
        state[f"{prefix}weight"] = rows_of(stacked(saved, form, experts), ownership.row_ids)
