"""The router: which experts see which token, and with what weight.

Letters, here and in the other files of this folder: T tokens on this rank, D model width, F hidden width of an
expert, E experts, K experts per token (top-k), S slots (rows) on this rank, N = T * K routed copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router decided for T tokens."""

    expert_ids_TK: Tensor
    """int64, the experts of each token, best first."""
    weights_TK: Tensor
    """float32, what each expert's output is multiplied by; they add up to 1 for each token."""
    probs_TE: Tensor
    """float32, the softmax over all experts, which the losses need."""
    logits_TE: Tensor
    """float32."""


class TopKRouter(nn.Module):
    """Softmax over experts, the K best of which are kept and renormalised. Scores are always float32.

    With `bias_balancing`, a bias per expert takes part in choosing but not in weighting, and is moved by
    `toolkit.moe.balance.BiasBalancing` (Wang et al. 2024, arXiv 2408.15664, algorithm 1).
    """

    def __init__(self, dim: int, num_experts: int, top_k: int, *, bias_balancing: bool = False):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must lie between 1 and num_experts={num_experts}")
        self.num_experts, self.top_k = num_experts, top_k
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        # Near-equal scores at first: early choices should follow the data, not the draw of these weights.
        nn.init.normal_(self.weight, std=0.1 * dim**-0.5)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(num_experts) if bias_balancing else None)

    def forward(self, x_TD: Tensor) -> Routing:
        with torch.autocast(x_TD.device.type, enabled=False):
            dtype = torch.promote_types(torch.float32, self.weight.dtype)
            logits_TE = nn.functional.linear(x_TD.to(dtype), self.weight.to(dtype))
        probs_TE = logits_TE.softmax(dim=-1)
        if self.bias is None:
            top_TK, ids_TK = probs_TE.topk(self.top_k, dim=-1)
        else:
            ids_TK = (probs_TE.detach() + self.bias).topk(self.top_k, dim=-1).indices
            top_TK = probs_TE.gather(-1, ids_TK)
        weights_TK = top_TK / top_TK.sum(dim=-1, keepdim=True)
        return Routing(ids_TK, weights_TK, probs_TE, logits_TE)
