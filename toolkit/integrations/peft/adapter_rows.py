"""Low-rank adapters of stacked experts, from PEFT's `target_parameters`, as rows of their experts.

PEFT keeps A as (experts * r, in), expert by expert, and B as (out, r * experts) with the expert as the fastest index.
Here both are stacked, A as (slots, r, in) and B as (slots, out, r), in PEFT's parameters and under their names, so that
an optimizer stays valid. Their layer's `ExpertStack` holds them, and treats them as further rows of each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.rows_in_files import RowsInFiles, stacked
from toolkit.experts.layer.stack import rows_of
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.sharding.layout import LowRank
from toolkit.experts.sharding.libraries import Library, library_of
from toolkit.integrations.peft.layouts import IN_FILES
from toolkit.integrations.peft.record import describe_adapters, write_records


class PeftLibrary(Library):
    """Adapters of stacked experts: `toolkit.integrations` registers it."""

    def find_adapters(self, model: nn.Module) -> dict[nn.Module, ExpertAdapters]:
        found: dict[nn.Module, ExpertAdapters] = {}
        for module in model.modules():
            if type(module) is lora.ParamWrapper:
                experts: Any = module.get_base_layer()
                found.setdefault(experts, ExpertAdapters(experts)).add(module)
        return found

    def record(self, model: nn.Module) -> Callable[[Path], None] | None:
        return partial(write_records, describe_adapters(model)) if hasattr(model, "peft_config") else None


class ExpertAdapters:
    """PEFT's adapters of the parameters of one experts module."""

    def __init__(self, experts: nn.Module):
        self.experts = experts
        self.wrappers: list[lora.ParamWrapper] = []
        self.parameters: dict[str, tuple[nn.Parameter, RowsInFiles]] = {}

    def add(self, wrapper: Any) -> None:
        self.wrappers.append(wrapper)
        for matrix, form in IN_FILES.items():
            for adapter, layer in getattr(wrapper, matrix).items():
                self.parameters[f"{wrapper.parameter_name}.{matrix}.{adapter}"] = layer.weight, form

    def fault(self, name: str) -> str | None:
        """Return a message if an adapter is not of a matrix that the experts are known to multiply by."""
        known = library_of(self.experts).projections(self.experts)
        adapted = (wrapper.parameter_name for wrapper in self.wrappers)
        if (unknown := next((each for each in adapted if each not in known), None)) is None:
            return None
        return (
            f"target_parameters: adapters of {unknown!r} of the experts at {name!r} ({type(self.experts).__name__}) "
            f"are not supported. Adapt {' or '.join(known) or 'attention, because how they multiply is not known'}."
        )

    def use_rows(self, num_experts: int) -> None:
        wrapper: Any
        for wrapper in self.wrappers:
            wrapper.__class__ = ParamWrapper
            for matrix, form in IN_FILES.items():
                for layer in getattr(wrapper, matrix).values():
                    # Weights that are loaded in PEFT's layout are stacked, too.
                    layer.register_load_state_dict_pre_hook(partial(_take_rows, form, num_experts))


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
        of_others = dict(experts.low_rank)  # not a mapping proxy, which has no copies
        experts.low_rank = {
            **of_others,
            self.parameter_name: [self._factors(name) for name in self.active_adapters if name in self.lora_A],
        }
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            experts.low_rank = of_others

    def _factors(self, adapter: str) -> LowRank:
        return LowRank(self.lora_A[adapter].weight, self.lora_B[adapter].weight, self.scaling[adapter])

    def get_delta_weight(self, adapter_name: str, *_: Any, **__: Any) -> Tensor:
        """Return the adapter's delta of its parameter's rows on this rank, for PEFT to merge."""
        a_SRI, b_SOR, scaling = self._factors(adapter_name)
        delta_SOI = torch.bmm(b_SOR, a_SRI) * scaling
        return (delta_SOI.transpose(1, 2) if self.get_base_layer().is_transposed else delta_SOI).to(self.get_param())

    def update_layer(self, adapter_name: str, *_: Any, **__: Any) -> None:
        raise UserError(f"adapter {adapter_name!r}: added after the experts were sharded. Add it before prepare.")


def _take_rows(form: RowsInFiles, experts: int, layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    saved, ownership = state.get(f"{prefix}weight"), ownership_of(layer.weight)  # type: ignore[arg-type]
    if saved is not None and saved.ndim == 2 and ownership is not None:
        state[f"{prefix}weight"] = rows_of(stacked(saved, form, experts), ownership.row_ids)
