"""Low-rank adapters of stacked experts, as PEFT's `target_parameters` makes them, as rows of their experts.

PEFT keeps A as (experts * r, in), expert by expert, and B as (out, r * experts) with the expert as the fastest index.
Here both are stacked, A as (slots, r, in) and B as (slots, out, r), under the names and in the parameters that PEFT
made, so that an optimizer stays valid. They are then in their layer's `ExpertStack`, and whatever is done with the rows
of an expert is done with those of its adapters.
"""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.hosts.transformers.kernel import experts_forward, projections
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.state.state_dict import rows_of

if TYPE_CHECKING:
    from toolkit.experts.hosts.peft.wrapper import ParamWrapper


def stack_adapters(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Turn PEFT's adapters of the experts modules `layers` of `model` into rows, one for each expert, in place.

    Call it before the experts are spread. Adapters of anything else stay as they are. Raises UserError, before anything
    is changed, for experts that do not say how they use their matrices, and for adapters of what is no matrix.
    """
    if "peft" not in sys.modules:
        return
    from toolkit.experts.hosts.peft.wrapper import ParamWrapper, wrappers_of

    found = wrappers_of(model, layers)
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
            for layer, stack in ((wrapper.lora_A[adapter], StackedA), (wrapper.lora_B[adapter], StackedB)):
                stack(layer, int(experts.num_experts))


def _refuse(name: str, wrapper: Any) -> None:
    experts, parameter = wrapper.get_base_layer(), wrapper.parameter_name
    kind = f"adapters of {parameter!r} of the experts at {name!r} ({type(experts).__name__})"
    known = projections(experts)
    if not known:
        raise UserError(
            f"{kind} are not supported, because these experts do not say where they multiply by it: "
            "use a mixture with one of transformers' experts implementations."
        )
    if parameter not in known:
        raise UserError(
            f"{kind} are not supported, because a low-rank product of it would mix experts: "
            f"use target_parameters {' or '.join(known)}."
        )


def _with_adapters(experts: Any) -> Any:
    """The forward of `experts`, with the low-rank products of adapters that are in use during the call."""
    signature = inspect.signature(experts.forward)
    # No closure: `copy.deepcopy` gives copied experts their own.
    forward: Any = functools.partial(_forward, experts, experts.forward, signature)
    forward.__signature__ = signature
    return forward


def _forward(experts: Any, forward: Any, signature: inspect.Signature, *args: Any, **kwargs: Any) -> Tensor:
    if not experts.low_rank:
        return forward(*args, **kwargs)
    return experts_forward(experts, *signature.bind(*args, **kwargs).args)


def adapter_rows(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters of an experts module by name, as `stack_adapters` stacked them."""
    wrappers: dict[str, ParamWrapper] = vars(experts).get("adapters", {})
    return {
        f"{parameter}.{matrix}.{adapter}": layer.weight
        for parameter, wrapper in wrappers.items()
        for matrix in ("lora_A", "lora_B")
        for adapter, layer in getattr(wrapper, matrix).items()
    }


# --- layouts ---------------------------------------------------------------------------------------------------------


class _Stacked(ABC):
    """The weight of one of PEFT's layers, stacked in place; what is loaded as PEFT saves it is stacked likewise."""

    def __init__(self, layer: Any, experts: int):
        self.experts = experts
        layer.weight.shape_when_made = layer.weight.shape  # for states that an optimizer has from the start
        layer.weight.data = self.stacked(layer.weight.data)
        layer.weight.as_saved = self.as_saved  # for `toolkit.experts.state.state_dict`
        layer.register_load_state_dict_pre_hook(self._take_rows)

    @abstractmethod
    def stacked(self, saved: Tensor) -> Tensor:
        """What PEFT saves, with a row per expert."""

    @abstractmethod
    def as_saved(self, stacked: Tensor) -> Tensor:
        """The rows of all experts, as PEFT saves them."""

    def _take_rows(self, layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        saved, ownership = state.get(f"{prefix}weight"), ownership_of(layer.weight)  # type: ignore[arg-type]
        if saved is not None and saved.ndim == 2 and ownership is not None:
            state[f"{prefix}weight"] = rows_of(self.stacked(saved), ownership.row_ids)


class StackedA(_Stacked):
    """A matrix A, of rank R and for I inputs. PEFT has the R rows of each expert one after another: (E * R, I)."""

    def stacked(self, saved: Float[Tensor, "ER I"]) -> Float[Tensor, "E R I"]:
        return saved.view(self.experts, -1, saved.shape[1])

    def as_saved(self, stacked: Float[Tensor, "E R I"]) -> Float[Tensor, "ER I"]:
        return stacked.flatten(0, 1)


class StackedB(_Stacked):
    """A matrix B, for O outputs and of rank R. PEFT has columns of experts within those of ranks: (O, R * E)."""

    def stacked(self, saved: Float[Tensor, "O RE"]) -> Float[Tensor, "E O R"]:
        return saved.view(len(saved), -1, self.experts).permute(2, 0, 1).contiguous()

    def as_saved(self, stacked: Float[Tensor, "E O R"]) -> Float[Tensor, "O RE"]:
        return stacked.permute(1, 2, 0).flatten(1)
