"""A router with vacant seats, and experts that take turns with the one they were split from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.moe.router import TopKRouter

NOBODY = -1


class DynamicRouter(TopKRouter):
    """Chooses among the experts that live; a row of `weight` for every seat, so that growth changes no shape.

    Where an expert was split, the two halves take turns: a *divider*, a half-space of the router's input, says which of
    them a token may go to. The other half's logit is minus infinity there, as is that of a vacant seat everywhere. So
    right after a split each token has one copy of the expert to go to, with the logit that the expert had, and nothing
    else about its routing changes either. Splits nest: the halves of a half keep to its side.
    """

    active_E: Tensor
    divider_ED: Tensor
    threshold_E: Tensor
    turns_EE: Tensor
    split_from_E: Tensor

    def __init__(self, dim: int, num_experts: int, top_k: int, *, active: int, **options: Any):
        super().__init__(dim, num_experts, top_k, **options)
        if self.expert_groups > 1 or self.force_balanced:
            raise ValueError("a router with vacant seats has no expert_groups and cannot be force_balanced")
        if not top_k <= active <= num_experts:
            raise ValueError(f"living={active} must lie between top_k={top_k} and num_experts={num_experts}")
        with torch.no_grad():
            self.weight[active:] = 0
        self.register_buffer("active_E", torch.arange(num_experts) < active)
        # A token is beyond divider s where divider_s . x > threshold_s.
        self.register_buffer("divider_ED", torch.zeros(num_experts, dim))
        self.register_buffer("threshold_E", torch.zeros(num_experts))
        # turns[s, e] is 1 where expert e gets only tokens beyond divider s, -1 where only others, 0 where any.
        self.register_buffer("turns_EE", torch.zeros(num_experts, num_experts))
        self.register_buffer("split_from_E", torch.full((num_experts,), NOBODY))
        # Known on the host, so that a forward need not ask: whether any seat is vacant, or any token's turn limited.
        self.has_vacant = self.has_turns = True

    def refresh(self) -> None:
        """Take note of what the buffers say. Until this is called any seat may be vacant and any turn limited, which
        is always right and a little slower; who writes to the buffers calls it afterwards. Waits for the device."""
        self.has_vacant, self.has_turns = not bool(self.active_E.all()), bool(self.turns_EE.any())

    def scores(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE, scores_TE = super().scores(x_TD)
        if not self.has_vacant and not self.has_turns:
            return logits_TE, scores_TE
        open_TE = self.open_TE(x_TD) if self.has_turns else self.active_E
        logits_TE = logits_TE.masked_fill(~open_TE, -torch.inf)
        return logits_TE, logits_TE.softmax(dim=-1) if self.score == "softmax" else logits_TE.sigmoid()

    @torch.no_grad()
    def open_TE(self, x_TD: Tensor) -> Tensor:
        """(T, E) bool: whose turn it is with each token."""
        with torch.autocast(x_TD.device.type, enabled=False):
            side_TE = torch.where(x_TD.to(self.divider_ED.dtype) @ self.divider_ED.T > self.threshold_E, 1.0, -1.0)
            agrees_TE = side_TE.to(self.turns_EE.dtype) @ self.turns_EE == self.turns_EE.abs().sum(0)
        return agrees_TE & self.active_E

    def choose(self, scores_TE: Tensor) -> Tensor:
        # A bias could lift what is closed, whose score is zero, above what is open.
        return super().choose(scores_TE.masked_fill(scores_TE == 0, -torch.inf))

    @property
    def num_choices(self) -> Tensor:
        """int64 scalar: the experts that live."""
        return self.active_E.sum()

    # --- what the lifecycle does, between two steps -----------------------------------------------------------

    @torch.no_grad()
    def logical_id(self, logical_id: int, *, beside: int | None = None) -> None:
        """Let an expert sit down on the vacant `logical_id`, with the row of `beside` or a row of zeros."""
        self.active_E[logical_id] = True
        self.weight[logical_id] = 0 if beside is None else self.weight[beside]
        if self.bias is not None:
            self.bias[logical_id] = 0 if beside is None else self.bias[beside]
        self.refresh()

    @torch.no_grad()
    def divide(self, logical_id: int, beside: int, divider_D: Tensor, threshold: float) -> None:
        """Have the new expert on `logical_id` take over from the one on `beside` what lies beyond the divider."""
        self.divider_ED[logical_id], self.threshold_E[logical_id] = divider_D.to(self.divider_ED), threshold
        self.turns_EE[:, logical_id] = self.turns_EE[:, beside]
        self.turns_EE[logical_id, logical_id], self.turns_EE[logical_id, beside] = 1, -1
        self.split_from_E[logical_id] = beside
        self.refresh()

    @torch.no_grad()
    def vacate(self, logical_id: int) -> None:
        """Clear `logical_id`. Its tokens fall to the last expert that was split from it, else to the one it was split from,
        where these live, and to whichever comes next in a token's order of preference otherwise."""
        halves = self.halves_of(logical_id)
        if halves:
            merged_into = halves[-1]
            self.split_from_E[halves] = merged_into
            self.split_from_E[merged_into] = self.split_from_E[logical_id]
            self.divider_ED[merged_into], self.threshold_E[merged_into] = (
                self.divider_ED[logical_id],
                self.threshold_E[logical_id],
            )
            self.turns_EE[merged_into] = self.turns_EE[logical_id]
        self.turns_EE[logical_id], self.divider_ED[logical_id], self.threshold_E[logical_id] = 0, 0, 0
        self.turns_EE[:, logical_id] = 0
        self.split_from_E[logical_id] = NOBODY
        self.active_E[logical_id] = False
        self.weight[logical_id] = 0
        self.refresh()

    def halves_of(self, logical_id: int) -> list[int]:
        """The seats that were split from `logical_id` and still take turns with it, in the order of these splits."""
        halves = (self.split_from_E == logical_id).nonzero().flatten().tolist()
        # A later half keeps to the side that the earlier ones left.
        return sorted(halves, key=lambda half: int((self.turns_EE[halves, half] == -1).sum()))
