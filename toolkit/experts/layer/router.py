"""The router: chooses the experts of each token and weights their outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from toolkit.errors import require
from toolkit.experts.layer.recompute import decide, in_region
from toolkit.experts.layer.router_options import RouterOptions

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's output for T tokens."""

    expert_ids_TK: Int[Tensor, "T K"]
    """int64, the logical experts of each token."""
    weights_TK: Float[Tensor, "T K"]
    """float32, the factors of the experts' outputs; they sum to 1 for each token unless `router_normalize` is off."""
    probs_TE: Float[Tensor, "T E"]
    """float32, the scores of all experts, normalized to sum to 1 for each token; the balance losses use them."""
    logits_TE: Float[Tensor, "T E"]
    """float32."""
    counted_T: Bool[Tensor, " T"] | None = None
    """bool, False for padding, which losses and loads ignore; None without padding."""


class ChoiceHook(Protocol):
    """Hook at the router's top-k choice, to record or replace it."""

    def choose(
        self, own: Callable[[], Int[Tensor, "T K"]], *, tokens: int, top_k: int, choices: int, device: torch.device
    ) -> Int[Tensor, "T K"]:
        """Return the experts of each token, for a router that would itself choose `own()` out of `choices`."""
        ...


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast in a context. Only if it is on, because entering costs as much as an operation on a few rows."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class TopKRouter(nn.Module):
    """Top-k routing: a linear map to E logits, a score of each, and the K experts with the highest scores.

    Scores are float32 under autocast too. `options` (`toolkit.experts.layer.router_options.RouterOptions`):

    - `router_score`: softmax over experts, or a sigmoid of each logit (DeepSeek-V3, arXiv 2412.19437, eq. 15).
    - `router_normalize`, `routed_scaling`: a token's weights are divided by their sum, then multiplied by the factor.
    - `balance` "bias": a bias per expert is added to the scores to choose, not to weight; `BiasBalancing` of
      `toolkit.train.callbacks.expert_balance` updates it (Wang et al. 2024, arXiv 2408.15664, algorithm 1).

    Raises UserError for a `top_k` below 1 or above `num_experts`.
    """

    experts_are_fixed = True
    """Whether every token can choose the same experts throughout training, so that routes can be replayed."""

    def __init__(self, dim: int, num_experts: int, top_k: int, options: RouterOptions | None = None):
        super().__init__()
        self.options = options = options or RouterOptions()
        require(1 <= top_k <= num_experts, "top_k", top_k, f"take 1 to {num_experts}, the number of experts")
        self.num_experts, self.top_k = num_experts, top_k
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        # Small, so that the first choices depend on the data more than on this draw.
        nn.init.normal_(self.weight, std=0.1 * dim**-0.5)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(num_experts) if options.balance == "bias" else None)
        self.route_hook: ChoiceHook | None = None

    @property
    def num_choices(self) -> int | Tensor:
        """The number of experts that can be chosen."""
        return self.num_experts

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Routing:
        logits_TE, scores_TE = self.scores(x_TD)
        # Softmax scores of the chosen experts, divided by their sum, equal the softmax over only their logits.
        by_logits = self.uses_softmax and self.options.router_normalize
        values_TE = logits_TE if by_logits else scores_TE
        by_score = self.bias is None and self.route_hook is None and type(self).choose is TopKRouter.choose
        if by_score and not in_region():  # one operation instead of two
            weights_TK, ids_TK = values_TE.topk(self.top_k, dim=-1)
        else:
            # `choose` is outside of autograd, so a recomputation, which skips it, saves the same tensors.
            ids_TK = decide(lambda: self.choose_or_replay(scores_TE.detach()))
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
            logits_TE = self.masked(nn.functional.linear(input_TD, self.weight.to(dtype)), x_TD)
        return logits_TE, logits_TE.softmax(dim=-1) if self.uses_softmax else logits_TE.sigmoid()

    def masked(self, logits_TE: Tensor, x_TD: Tensor) -> Tensor:  # noqa: ARG002
        """`logits_TE` with minus infinity for experts that a token may not choose; here it may choose any."""
        return logits_TE

    def choose_or_replay(self, scores_TE: Float[Tensor, "T E"]) -> Int[Tensor, "T K"]:
        """Return (T, K), the experts of each token, recorded or replayed if a hook is set."""
        if self.route_hook is None:
            return self.choose(scores_TE)
        tokens, choices = scores_TE.shape
        own = partial(self.choose, scores_TE)
        return self.route_hook.choose(own, tokens=tokens, top_k=self.top_k, choices=choices, device=scores_TE.device)

    def choose(self, scores_TE: Float[Tensor, "T E"]) -> Int[Tensor, "T K"]:
        """(T, K): the experts of each token, best first."""
        if self.bias is not None:
            scores_TE = scores_TE + self.bias
        return scores_TE.topk(self.top_k, dim=-1).indices

    @property
    def uses_softmax(self) -> bool:
        return self.options.router_score == "softmax"

    def probs(self, scores_TE: Tensor) -> Tensor:
        """(T, E) scores that sum to 1 for each token."""
        return scores_TE if self.uses_softmax else self.normalized(scores_TE)

    def normalized(self, scores: Tensor) -> Tensor:
        """`scores` (T, E or K), divided by their sum for each token."""
        total = scores.sum(dim=-1, keepdim=True)
        # The sum of sigmoids can underflow to 0; the sum of the largest softmax scores cannot.
        return scores / (total if self.uses_softmax else total + 1e-20)
