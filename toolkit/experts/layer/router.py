"""The router: chooses the experts of each token and weights their outputs.

Letters, here and in the other files of this folder: T tokens on this rank, D model width, F hidden width of an
expert, E logical experts, K experts per token (top-k), S slots (physical experts) on this rank, N = T * K assignments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.recompute import decide, in_region
from toolkit.experts.layer.router_options import RouterOptions


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's output for T tokens."""

    expert_ids_TK: Int[Tensor, "T K"]
    """int64, the logical experts of each token, highest score first."""
    weights_TK: Float[Tensor, "T K"]
    """float32, the factors of the experts' outputs; they sum to 1 for each token unless `router_normalize` is off."""
    probs_TE: Float[Tensor, "T E"]
    """float32, the scores of all experts, normalized to sum to 1 for each token; the balance losses use them."""
    logits_TE: Float[Tensor, "T E"]
    """float32."""
    kept_TK: Bool[Tensor, "T K"] | None = None
    """bool, False for assignments that are dropped; None where all are kept."""
    counted_T: Bool[Tensor, " T"] | None = None
    """bool, False for padding, which no loss and no load counts; None where there is none."""


class ChoiceHook(Protocol):
    """What stands where a router chooses, to record its choices or to give it others."""

    def choose(
        self, own: Callable[[], Int[Tensor, "T K"]], *, tokens: int, top_k: int, choices: int, device: torch.device
    ) -> Int[Tensor, "T K"]:
        """Returns the experts of each token, for a router that would itself choose `own()` out of `choices`."""
        ...


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast is off within it. Entering costs as much as an operation on a few rows, so only where it is on."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class TopKRouter(nn.Module):
    """Top-k routing: a linear map to E logits, a score of each, and the K experts with the highest scores.

    Scores are float32 under autocast too. `options` (`toolkit.experts.layer.router_options.RouterOptions`):

    - `router_score`: softmax over experts, or a sigmoid of each logit (DeepSeek-V3, arXiv 2412.19437, eq. 15).
    - `router_normalize`, `routed_scaling`: a token's weights are divided by their sum, then multiplied by the factor.
    - `router_groups`, `top_k_groups`: experts form consecutive groups of equal size, and a token chooses among the
      best `top_k_groups` of them. A group's rank is the sum of its two best scores (`router_group_score` "top2",
      DeepSeek-V3) or its best one ("max", DeepSeek-V2).
    - `router_jitter`: in training the router's input, not the experts', is multiplied by uniform noise from 1 - jitter
      to 1 + jitter (Fedus et al. 2021, arXiv 2101.03961, section 2.2). It draws from PyTorch's default generator, which
      the trainer seeds by (seed, step, micro-batch, rank).
    - `balance` "bias": a bias per expert is added to the scores to choose, not to weight; `BiasBalancing` of
      `toolkit.train.callbacks.expert_balance` updates it (Wang et al. 2024, arXiv 2408.15664, algorithm 1).
    - `force_balanced`: assignments go to experts round-robin on each rank, and the scores only weight them. For
      benchmarks.

    Raises UserError for options that do not fit `num_experts` and `top_k`.
    """

    def __init__(self, dim: int, num_experts: int, top_k: int, options: RouterOptions | None = None):
        super().__init__()
        self.options = options = options or RouterOptions()
        options.check_fits(num_experts, top_k)
        self.num_experts, self.top_k = num_experts, top_k
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        # Small, so that the first choices depend on the data more than on this draw.
        nn.init.normal_(self.weight, std=0.1 * dim**-0.5)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(num_experts) if options.balance == "bias" else None)
        self.limits_groups = options.top_k_groups < options.router_groups
        self.chooses_by_score = not (options.balance == "bias" or options.force_balanced or self.limits_groups)
        self.route_hook: ChoiceHook | None = None

    @property
    def num_choices(self) -> int | Tensor:
        """The number of experts that can be chosen."""
        return self.num_experts

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Routing:
        logits_TE, scores_TE = self.scores(x_TD)
        # The scores of a softmax that are divided by their sum are the softmax of their logits alone.
        by_logits = self.uses_softmax and self.options.router_normalize
        values_TE = logits_TE if by_logits else scores_TE
        if self.chooses_by_score and self.route_hook is None and not in_region():  # one operation instead of two
            weights_TK, ids_TK = values_TE.topk(self.top_k, dim=-1)
        else:
            # `choose` is outside of autograd, so a recomputation, which skips it, saves the same tensors.
            ids_TK = decide(lambda: self.chosen(scores_TE.detach()))
            weights_TK = values_TE.gather(-1, ids_TK)
        if by_logits:
            weights_TK = weights_TK.softmax(dim=-1)
        elif self.options.router_normalize:
            weights_TK = self.normalized(weights_TK)
        if self.options.routed_scaling != 1:
            weights_TK = weights_TK * self.options.routed_scaling
        return Routing(ids_TK, weights_TK, self.probs(scores_TE), logits_TE)

    def scores(self, x_TD: Float[Tensor, "T D"]) -> tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
        """(T, E) logits, and the scores of them."""
        with without_autocast(x_TD.device):
            dtype = torch.promote_types(torch.float32, self.weight.dtype)
            input_TD = x_TD.to(dtype)
            jitter = self.options.router_jitter
            if jitter and self.training:
                input_TD = input_TD * torch.empty_like(input_TD).uniform_(1 - jitter, 1 + jitter)
            logits_TE = self.masked(nn.functional.linear(input_TD, self.weight.to(dtype)), x_TD)
        return logits_TE, logits_TE.softmax(dim=-1) if self.uses_softmax else logits_TE.sigmoid()

    def masked(self, logits_TE: Tensor, x_TD: Tensor) -> Tensor:  # noqa: ARG002
        """`logits_TE` with minus infinity for experts that a token may not choose; here it may choose any."""
        return logits_TE

    def chosen(self, scores_TE: Float[Tensor, "T E"]) -> Int[Tensor, "T K"]:
        """(T, K): the experts of each token, recorded or replayed where that was asked for."""
        if self.route_hook is None:
            return self.choose(scores_TE)
        tokens, choices = scores_TE.shape
        own = partial(self.choose, scores_TE)
        return self.route_hook.choose(own, tokens=tokens, top_k=self.top_k, choices=choices, device=scores_TE.device)

    def choose(self, scores_TE: Float[Tensor, "T E"]) -> Int[Tensor, "T K"]:
        """(T, K): the experts of each token, best first."""
        if self.options.force_balanced:
            assignments_N = torch.arange(len(scores_TE) * self.top_k, device=scores_TE.device)
            return (assignments_N % self.num_experts).view(-1, self.top_k)
        if self.bias is not None:
            scores_TE = scores_TE + self.bias
        if self.limits_groups:
            scores_TE = self.within_best_groups(scores_TE)
        return scores_TE.topk(self.top_k, dim=-1).indices

    def within_best_groups(self, scores_TE: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        """`scores_TE` with minus infinity outside of each token's best groups."""
        grouped_TGE = scores_TE.unflatten(-1, (self.options.router_groups, -1))
        if self.options.router_group_score == "top2":
            group_TG = grouped_TGE.topk(2, dim=-1).values.sum(-1)
        else:
            group_TG = grouped_TGE.amax(-1)
        best = group_TG.topk(self.options.top_k_groups, dim=-1).indices
        outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(-1, best, False)
        return grouped_TGE.masked_fill(outside_TG.unsqueeze(-1), -torch.inf).flatten(-2)

    @property
    def uses_softmax(self) -> bool:
        return self.options.router_score == "softmax"

    def probs(self, scores_TE: Tensor) -> Tensor:
        """(T, E) scores that sum to 1 for each token."""
        return scores_TE if self.uses_softmax else self.normalized(scores_TE)

    def normalized(self, scores: Tensor) -> Tensor:
        """`scores` (T, E or K), divided by their sum for each token."""
        total = scores.sum(dim=-1, keepdim=True)
        # The sum of sigmoids may underflow to 0; that of the largest of a softmax may not.
        return scores / (total if self.uses_softmax else total + 1e-20)


class ExpertChoiceRouter(TopKRouter):
    """Each expert takes its best tokens: T * K / E of them, rounded up (Zhou et al. 2022, arXiv 2202.09368).

    Balanced by construction, so it needs no balance loss. A token may get no expert, or many. An expert chooses among
    this rank's tokens of the micro-batch, so the result for a token depends on the others in it, on later ones of its
    sequence too: not for causal language models, and not the same on another number of ranks. Routing weights are the
    scores, not normalized. Raises UserError for options other than `router_score` and `router_jitter`.
    """

    def __init__(self, dim: int, num_experts: int, top_k: int, options: RouterOptions | None = None):
        options = options or RouterOptions()
        if options != RouterOptions(router_score=options.router_score, router_jitter=options.router_jitter):
            raise UserError(
                f"{options}: expert choice takes router_score and router_jitter only; leave out the others."
            )
        super().__init__(dim, num_experts, top_k, options)

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Routing:
        """Lists all experts for each token (K is E here); `kept_TK` is True where the expert took the token."""
        logits_TE, scores_TE = self.scores(x_TD)
        kept_TE = decide(lambda: self.taken(scores_TE.detach()))
        ids_TE = torch.arange(self.num_experts, device=x_TD.device).expand_as(scores_TE)
        return Routing(ids_TE, scores_TE, self.probs(scores_TE), logits_TE, kept_TE)

    def taken(self, scores_TE: Float[Tensor, "T E"]) -> Bool[Tensor, "T E"]:
        """(T, E) bool: True where the expert takes the token."""
        tokens = len(scores_TE)
        each = min(tokens, -(-tokens * self.top_k // self.num_experts))
        best_CE = scores_TE.topk(each, dim=0).indices
        return torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, best_CE, True)
