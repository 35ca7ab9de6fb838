"""The options of a router. Their names and descriptions are those of a recipe's flags."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from toolkit.experts.options import Options

Score = Literal["softmax", "sigmoid"]
Balance = Literal["loss", "bias", "none"]


class RouterOptions(Options):
    """Options of the router of an MoE layer, which `toolkit.experts.layer.router.TopKRouter` takes."""

    balance: Balance = "loss"
    """Keep all experts in use: by a balance loss, by a bias on the router's choice (DeepSeek-V3), or not at all."""
    router_score: Score = "softmax"
    """Score experts by a softmax over all of them, or by a sigmoid of each one's logit (DeepSeek-V3)."""
    router_normalize: bool = True
    """Scale the routing weights of each token to sum to 1."""
    routed_scaling: PositiveFloat = 1.0
    """Multiply routing weights by this factor, after normalization."""
