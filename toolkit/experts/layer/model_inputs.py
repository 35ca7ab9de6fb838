"""Model inputs that routing statistics and router losses need.

`watch_inputs(model)` keeps the arguments of each forward pass until it ends. Layers can then tell which of their tokens
are padding, and whether the loss that the model returns already has a balance loss.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Bool

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
CACHES = ("cache", "past_key_values")
"""Names of transformers' KV cache argument, since 5.24 and before."""


class _Call(NamedTuple):
    """A forward pass in progress."""

    attention_mask_BL: Tensor | None
    """0 for padding; None without a mask, or if it does not mark padding (a mask of pairs of tokens)."""
    has_cache: bool
    """Whether the mask begins with tokens of earlier forwards."""
    adds_balance_loss: bool


# One model inside of another may be watched, too. One thread at a time runs forwards, as in `layer/recompute.py`.
_calls: list[_Call] = []


def watch_inputs(model: nn.Module) -> None:
    """Watch the inputs of each forward pass of `model`. A second call does nothing; copies are watched as well."""
    if "inputs_are_watched" not in vars(model):
        model.inputs_are_watched = True  # type: ignore[assignment]
        model.register_forward_pre_hook(_begin, with_kwargs=True)
        model.register_forward_hook(_end, always_call=True)


def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = dict(kwargs)
    if args:
        given |= zip(inspect.signature(model.forward).parameters, args, strict=False)
    mask = given.get("attention_mask")
    config = getattr(model, "config", None)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or getattr(config, "is_encoder_decoder", False):
        mask = None
    asked = given.get("output_router_logits")
    adds = asked if asked is not None else own_balance_loss(model) is not None
    _calls.append(
        _Call(
            mask,
            has_cache=any(given.get(name) is not None for name in CACHES),
            adds_balance_loss=bool(adds) and balance_coefficient(model)[1] != 0 and given.get("labels") is not None,
        )
    )


def _end(*_: Any) -> None:
    _calls.pop()


def counted_tokens(tokens: int) -> Bool[Tensor, " T"] | None:
    """Return bool (T), False for padding among the `tokens` of a layer; None without a mask of matching size.

    `attention_mask` (B, L) of the current forward pass is 0 for padding. No host sync.
    """
    mask_BL = _calls[-1].attention_mask_BL if _calls else None
    if mask_BL is None or not len(mask_BL):
        return None
    if mask_BL.numel() != tokens and _calls[-1].has_cache and tokens % len(mask_BL) == 0:
        mask_BL = mask_BL[:, -(tokens // len(mask_BL)) :]
    return mask_BL.reshape(-1) != 0 if mask_BL.numel() == tokens else None


def model_adds_balance_loss() -> bool:
    """Return whether the forward under way returns a loss that has a balance loss of the model's own."""
    return bool(_calls) and _calls[-1].adds_balance_loss


def own_balance_loss(model: nn.Module) -> str | None:
    """Return the settings with which `model` adds its own balance loss to its loss; None if it adds none."""
    config = getattr(model, "config", None)
    name, value = balance_coefficient(model)
    if not getattr(config, "output_router_logits", False) or value == 0:
        return None
    return "output_router_logits=True" + (f", {name}={value:g}" if name else "")


def balance_coefficient(model: nn.Module) -> tuple[str, float]:
    """Return the setting that has the weight of a model's own balance loss, or an empty name, and its value."""
    config = getattr(model, "config", None)
    for settings in (config, getattr(config, "text_config", None)):
        for name in COEFFICIENTS:
            if isinstance(value := getattr(settings, name, None), (int, float)):
                return name, float(value)
    return "", 1.0
