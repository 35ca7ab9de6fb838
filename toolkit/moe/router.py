"""The router: which experts see which token, and with what weight.

Letters, here and in the other files of this folder: T tokens on this rank, D model width, F hidden width of an
expert, E experts, K experts per token (top-k), S slots (rows) on this rank, N = T * K routed copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from toolkit.moe.recompute import decide, in_region

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2", "max"]


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router decided for T tokens."""

    expert_ids_TK: Int[Tensor, "T K"]
    """int64, the experts of each token, best first."""
    weights_TK: Float[Tensor, "T K"]
    """float32, what each expert's output is multiplied by; as a rule they add up to 1 for each token."""
    probs_TE: Float[Tensor, "T E"]
    """float32, the scores of all experts, which the losses need; they add up to 1 for each token."""
    logits_TE: Float[Tensor, "T E"]
    """float32."""
    kept_TK: Bool[Tensor, "T K"] | None = None
    """bool, which of the choices count; None where all do."""


class TopKRouter(nn.Module):
    """Scores over experts, the K best of which are kept and renormalised. Scores are always float32.

    - `score`: softmax over experts, or each expert's own sigmoid (DeepSeek-V3, arXiv 2412.19437, eq. 15).
    - `normalize`: whether a token's weights are made to add up to 1; `scaling` multiplies them afterwards.
    - `expert_groups`: experts form so many consecutive groups, and a token chooses among the best `top_k_groups` of
      them. A group is as good as its best two experts together (`top2`, DeepSeek-V3) or its best one (`max`,
      DeepSeek-V2).
    - `jitter`: in training the router, and only the router, sees inputs multiplied by uniform noise from 1 - jitter to
      1 + jitter (Fedus et al. 2021, arXiv 2101.03961, section 2.2). It draws from PyTorch's generator, which the
      trainer seeds by (seed, step, micro-batch, rank).
    - `bias_balancing`: a bias per expert takes part in choosing but not in weighting, and is moved by
      `toolkit.moe.balance.BiasBalancing` (Wang et al. 2024, arXiv 2408.15664, algorithm 1).
    - `force_balanced`: experts take turns, on each rank from the first on, whatever the scores say, which still weight
      them. For measuring speed.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        normalize: bool = True,
        scaling: float = 1.0,
        expert_groups: int = 1,
        top_k_groups: int = 1,
        group_score: GroupScore = "top2",
        jitter: float = 0.0,
        bias_balancing: bool = False,
        force_balanced: bool = False,
    ):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must lie between 1 and num_experts={num_experts}")
        if expert_groups < 1 or num_experts % expert_groups:
            raise ValueError(f"expert_groups={expert_groups} must divide num_experts={num_experts}")
        size = num_experts // expert_groups
        if not 1 <= top_k_groups <= expert_groups or top_k > top_k_groups * size:
            raise ValueError(
                f"top_k_groups={top_k_groups} must lie between 1 and expert_groups={expert_groups}, and leave "
                f"top_k={top_k} experts"
            )
        if top_k_groups < expert_groups and group_score == "top2" and size < 2:
            raise ValueError(f"group_score='top2' needs two experts in each of the expert_groups={expert_groups}")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter={jitter} must be a fraction below 1")
        self.num_experts, self.top_k, self.score = num_experts, top_k, score
        self.normalize, self.scaling, self.jitter, self.force_balanced = normalize, scaling, jitter, force_balanced
        self.expert_groups, self.top_k_groups, self.group_score = expert_groups, top_k_groups, group_score
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        # Near-equal scores at first: early choices should follow the data, not the draw of these weights.
        nn.init.normal_(self.weight, std=0.1 * dim**-0.5)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(num_experts) if bias_balancing else None)
        self.takes_the_best = not (bias_balancing or force_balanced or top_k_groups < expert_groups)

    @property
    def num_choices(self) -> int | Tensor:
        """How many experts there are to choose from."""
        return self.num_experts

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Routing:
        logits_TE, scores_TE = self.scores(x_TD)
        if self.takes_the_best and not in_region():  # as below, in one operation
            weights_TK, ids_TK = scores_TE.topk(self.top_k, dim=-1)
        else:
            # Choosing leaves no trace in autograd, so a recomputation, which does not choose, leaves the same.
            ids_TK = decide(lambda: self.choose(scores_TE.detach()))
            weights_TK = scores_TE.gather(-1, ids_TK)
        if self.normalize:
            weights_TK = _to_sum_1(weights_TK, self.score)
        if self.scaling != 1:
            weights_TK = weights_TK * self.scaling
        probs_TE = scores_TE if self.score == "softmax" else _to_sum_1(scores_TE, self.score)
        return Routing(ids_TK, weights_TK, probs_TE, logits_TE)

    def scores(self, x_TD: Float[Tensor, "T D"]) -> tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
        """(T, E) logits, and what the score makes of them."""
        with torch.autocast(x_TD.device.type, enabled=False):
            dtype = torch.promote_types(torch.float32, self.weight.dtype)
            x_TD = x_TD.to(dtype)
            if self.jitter and self.training:
                x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.jitter, 1 + self.jitter)
            logits_TE = nn.functional.linear(x_TD, self.weight.to(dtype))
        return logits_TE, logits_TE.softmax(dim=-1) if self.score == "softmax" else logits_TE.sigmoid()

    def choose(self, scores_TE: Float[Tensor, "T E"]) -> Int[Tensor, "T K"]:
        """(T, K): the experts of each token, best first."""
        if self.force_balanced:
            assignments_N = torch.arange(len(scores_TE) * self.top_k, device=scores_TE.device)
            return (assignments_N % self.num_experts).view(-1, self.top_k)
        if self.bias is not None:
            scores_TE = scores_TE + self.bias
        if self.top_k_groups < self.expert_groups:
            scores_TE = self.within_best_groups(scores_TE)
        return scores_TE.topk(self.top_k, dim=-1).indices

    def within_best_groups(self, scores_TE: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        """`scores_TE` with minus infinity outside of each token's best groups."""
        grouped_TGE = scores_TE.unflatten(-1, (self.expert_groups, -1))
        if self.group_score == "top2":
            group_TG = grouped_TGE.topk(2, dim=-1).values.sum(-1)
        else:
            group_TG = grouped_TGE.amax(-1)
        best = group_TG.topk(self.top_k_groups, dim=-1).indices
        outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(-1, best, False)
        return grouped_TGE.masked_fill(outside_TG.unsqueeze(-1), -torch.inf).flatten(-2)


class ExpertChoiceRouter(TopKRouter):
    """Each expert takes its best tokens: T * K / E of them, rounded up (Zhou et al. 2022, arXiv 2202.09368).

    Balanced by construction, so no balance loss goes with it. A token may get no expert, or many. An expert
    chooses among this rank's tokens of the micro-batch, so what a token gets depends on the others there, on later
    ones of its sequence too: not for causal language models, and not the same on another number of ranks.
    Weights are the scores, not renormalised.
    """

    def __init__(self, dim: int, num_experts: int, top_k: int, *, score: Score = "softmax", jitter: float = 0.0):
        super().__init__(dim, num_experts, top_k, score=score, normalize=False, jitter=jitter)

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Routing:
        """Every expert is listed for each token (K is E here), and `kept_TK` says which of them took it."""
        logits_TE, scores_TE = self.scores(x_TD)
        kept_TE = decide(lambda: self.taken(scores_TE.detach()))
        ids_TE = torch.arange(self.num_experts, device=x_TD.device).expand_as(scores_TE)
        probs_TE = scores_TE if self.score == "softmax" else _to_sum_1(scores_TE, self.score)
        return Routing(ids_TE, scores_TE, probs_TE, logits_TE, kept_TE)

    def taken(self, scores_TE: Float[Tensor, "T E"]) -> Bool[Tensor, "T E"]:
        """(T, E) bool: whether the expert takes the token."""
        tokens = len(scores_TE)
        each = min(tokens, -(-tokens * self.top_k // self.num_experts))
        best_CE = scores_TE.topk(each, dim=0).indices
        return torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, best_CE, True)


def _to_sum_1(scores: Tensor, score: Score) -> Tensor:
    total = scores.sum(dim=-1, keepdim=True)
    # Sigmoids may all be zero, the best of a softmax may not.
    return scores / (total if score == "softmax" else total + 1e-20)
