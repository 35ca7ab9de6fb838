"""Which balance penalty a model is trained with: said when it is prepared."""

from __future__ import annotations

from torch import nn

from toolkit.errors import UserError
from toolkit.experts.layer.losses import TWO_BALANCE_LOSSES, balance_weight_of
from toolkit.experts.routing.model_inputs import own_balance_loss, watch_inputs


def describe_balance(model: nn.Module) -> str:
    """One line: the balance penalty is that of a `RouterPenalty`, the model's own, or none.

    From now on its forwards tell padding from tokens (`toolkit.experts.routing.model_inputs`). Raises UserError for a model
    that has both.
    """
    watch_inputs(model)
    weight, own = balance_weight_of(model.modules()), own_balance_loss(model)
    if weight and own:
        raise UserError(TWO_BALANCE_LOSSES)
    if weight:
        return f"balance penalty: RouterPenalty, balance_weight={weight:g}."
    if own:
        return f"balance penalty: the model's own aux_loss, of each rank's tokens ({own})."
    return "balance penalty: none."
