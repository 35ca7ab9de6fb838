"""The options of a router. Their names and descriptions are those of a recipe's flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from toolkit.run.config.choices import require_choices
from toolkit.run.config.run import require

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2", "max"]
Balance = Literal["loss", "bias", "none"]


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Router of the MoE layers.

    What `toolkit.experts.layer.router.TopKRouter` takes; `check` compares it with the number of experts.
    """

    balance: Balance = "loss"
    """Keep all experts in use: by a balance loss, by a bias on the router's choice (DeepSeek-V3), or not at all."""
    router_score: Score = "softmax"
    """Score experts by a softmax over all of them, or by a sigmoid of each one's logit (DeepSeek-V3)."""
    router_normalize: bool = True
    """Scale the routing weights of each token to sum to 1."""
    routed_scaling: float = 1.0
    """Multiply routing weights by this factor, after normalization."""
    router_groups: int = 1
    """Divide the experts into this many groups of consecutive ids, for group-limited routing."""
    top_k_groups: int = 1
    """Choose each token's experts from its best so many groups."""
    router_group_score: GroupScore = "top2"
    """Rank groups by the sum of their two best scores (DeepSeek-V3), or by the best one (DeepSeek-V2)."""
    router_jitter: float = 0.0
    """Multiply the router's input in training by uniform noise from 1 - jitter to 1 + jitter."""
    force_balanced: bool = False
    """Route round-robin whatever the scores are; for benchmarks only."""

    def check(self, experts: int, top_k: int) -> None:
        """Raise UserError unless a router with so many `experts` can have these options."""
        require_choices(self)
        most = max(1, experts)
        require(1 <= top_k <= most, "top_k", top_k, f"take 1 to {most}, the number of --experts")
        require(0 < self.routed_scaling < math.inf, "routed_scaling", self.routed_scaling, "take a positive number")
        groups, chosen = self.router_groups, self.top_k_groups
        fits = groups >= 1 and experts % groups == 0
        require(fits, "router_groups", groups, f"take one or more that divide --experts {experts}")
        enough = -(-top_k * groups // most)
        fits = enough <= chosen <= groups
        require(fits, "top_k_groups", chosen, f"take {enough} to {groups}, to find --top-k {top_k} experts")
        fits = chosen == groups or experts == 0 or experts >= 2 * groups or self.router_group_score == "max"
        require(fits, "router_groups", groups, "leave two experts or more in a group, which is judged by its best two")
        require(0 <= self.router_jitter < 1, "router_jitter", self.router_jitter, "take a fraction below 1")
