"""PEFT's wrapper of one stacked parameter, once its adapters are rows of experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora import layer
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.hosts.spreading.foreign import LowRank


class ParamWrapper(layer.ParamWrapper):  # PEFT asks for this name
    """PEFT's wrapper with A as (slots, r, in) and B as (slots, out, r).

    PEFT folds the product of both into a new weight on every forward, and computes that weight's gradient. This one
    hands A and B to the experts for the time of their forward. Merging, disabling and choosing adapters are PEFT's.
    """

    # What PEFT's modules have, and torch's types do not say.
    base_layer: Any
    get_base_layer: Any
    lora_A: Any
    lora_B: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("adapter_names", None) is not None:
            raise UserError("adapter_names: experts take one choice of adapters for a whole batch, not one per sample.")
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
        """What the adapter adds to the rows of its parameter on this rank: what PEFT merges."""
        a_SRI, b_SOR, scaling = self._factors(adapter_name)
        delta_SOI = torch.bmm(b_SOR, a_SRI) * scaling
        return (delta_SOI.transpose(1, 2) if self.get_base_layer().is_transposed else delta_SOI).to(self.get_param())

    def update_layer(self, adapter_name: str, *_: Any, **__: Any) -> None:
        raise UserError(f"adapter {adapter_name!r} was added to experts that are prepared: add it before prepare.")


def wrappers_of(model: nn.Module, experts: Iterable[nn.Module]) -> dict[str, layer.ParamWrapper]:
    """PEFT's wrappers of parameters of the modules `experts` that are not rows yet, by name."""
    holders = [getattr(module, "experts", module) for module in experts]  # our own layers hold their experts
    ids = {id(holder.get_base_layer() if isinstance(holder, layer.ParamWrapper) else holder) for holder in holders}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is layer.ParamWrapper and id(module.get_base_layer()) in ids
    }
