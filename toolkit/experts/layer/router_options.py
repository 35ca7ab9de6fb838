"""The options of a router. Their names and descriptions are those of a recipe's flags."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from toolkit.errors import require
from toolkit.experts.options import FractionBelowOne, Options

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2", "max"]
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
    router_groups: PositiveInt = 1
    """Divide the experts into this many groups of consecutive ids, for group-limited routing."""
    top_k_groups: PositiveInt = 1
    """Choose each token's experts from its best so many groups."""
    router_group_score: GroupScore = "top2"
    """Rank groups by the sum of their two best scores (DeepSeek-V3), or by the best one (DeepSeek-V2)."""
    router_jitter: FractionBelowOne = 0.0
    """Multiply the router's input in training by uniform noise from 1 - jitter to 1 + jitter."""
    force_balanced: bool = False
    """Route round-robin whatever the scores are; for benchmarks only."""

    def idle(self) -> dict[str, str]:
        ungrouped = {"router_group_score": "with router_groups=1"} if self.router_groups == 1 else {}
        return super().idle() | ungrouped

    def check_fits(self, experts: int, top_k: int) -> None:
        """Raise UserError unless a router with so many `experts` can have these options."""
        most = max(1, experts)
        require(1 <= top_k <= most, "top_k", top_k, f"take 1 to {most}, the number of experts")
        groups, chosen = self.router_groups, self.top_k_groups
        require(experts % groups == 0, "router_groups", groups, f"take one or more that divide experts={experts}")
        enough = -(-top_k * groups // most)
        fits = enough <= chosen <= groups
        require(fits, "top_k_groups", chosen, f"take {enough} to {groups}, to find top_k={top_k} experts")
        fits = chosen == groups or experts == 0 or experts >= 2 * groups or self.router_group_score == "max"
        require(fits, "router_groups", groups, "leave two experts or more in a group, which is judged by its best two")
