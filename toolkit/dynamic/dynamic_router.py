"""A router with inactive experts, and with experts restricted to one side of the hyperplanes of their splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.experts.layer.router import TopKRouter, without_autocast
from toolkit.experts.layer.router_options import RouterOptions

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

NO_EXPERT = -1


@dataclass(frozen=True)
class Hyperplane:
    """A plane in the router's input space: a new expert gets the tokens with `normal_D` . x > `offset`, its parent the
    rest."""

    normal_D: Tensor
    offset: float


class DynamicRouter(TopKRouter):
    """Top-k routing among the active experts. `weight` has a row for every logical expert, so growth changes no shape.

    When an expert is split, a hyperplane in the router's input space divides its tokens between it and the new expert:
    on the other side, an expert's logit is minus infinity; an inactive expert's logit is always minus infinity. The new
    expert starts with its parent's row, so a split does not change the logits and weights of any token. Splits nest:
    both experts of a split keep the restrictions of the expert that was split.
    """

    experts_are_fixed = False
    active_E: Tensor
    normal_ED: Tensor
    offset_E: Tensor
    side_EE: Tensor
    split_from_E: Tensor

    def __init__(self, dim: int, num_experts: int, top_k: int, options: RouterOptions | None = None, *, active: int):
        super().__init__(dim, num_experts, top_k, options)
        with torch.no_grad():
            self.weight[active:] = 0
        self.register_buffer("active_E", torch.arange(num_experts) < active)
        # Hyperplane s belongs to the split that created expert s: normal_s . x > offset_s on its side.
        self.register_buffer("normal_ED", torch.zeros(num_experts, dim))
        self.register_buffer("offset_E", torch.zeros(num_experts))
        # side_EE[s, e]: 1 if expert e gets only tokens above hyperplane s, -1 only tokens below it, 0 both.
        self.register_buffer("side_EE", torch.zeros(num_experts, num_experts))
        self.register_buffer("split_from_E", torch.full((num_experts,), NO_EXPERT))
        # Known on the host, so that a forward need not wait for the device: whether there is anything to mask.
        self.has_inactive = self.has_splits = True

    def refresh(self) -> None:
        """Read from the buffers whether there is anything to mask. Call it after they change.

        Masks are always applied until `refresh`, which is correct and a little slower. Waits for the device.
        """
        self.has_inactive = not bool(self.active_E.all())
        self.has_splits = bool(self.side_EE.any())

    def masked(self, logits_TE: Float[Tensor, "T E"], x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
        if not self.has_inactive and not self.has_splits:
            return logits_TE
        allowed_TE = self.allowed_TE(x_TD) if self.has_splits else self.active_E
        return logits_TE.masked_fill(~allowed_TE, -torch.inf)

    @torch.no_grad()
    def allowed_TE(self, x_TD: Float[Tensor, "T D"]) -> Bool[Tensor, "T E"]:
        """Return (T, E) bool: True if the expert is active and the token on its side of all hyperplanes."""
        with without_autocast(x_TD.device):
            above_TE = torch.where(x_TD.to(self.normal_ED.dtype) @ self.normal_ED.T > self.offset_E, 1.0, -1.0)
            inside_TE = above_TE.to(self.side_EE.dtype) @ self.side_EE == self.side_EE.abs().sum(0)
        return inside_TE & self.active_E

    def choose(self, scores_TE: Float[Tensor, "T E"]) -> Int[Tensor, "T K"]:
        # Masked experts have a score of 0, which a bias could lift above the score of an allowed expert.
        return super().choose(scores_TE.masked_fill(scores_TE == 0, -torch.inf))

    @property
    def num_choices(self) -> Int[Tensor, ""]:
        """int64 scalar: the number of active experts."""
        return self.active_E.sum()

    # --- changes, between two optimizer steps -----------------------------------------------------------------------

    @torch.no_grad()
    def split(self, parent: int, new: int, plane: Hyperplane) -> None:
        """Activate logical expert `new` with the row of `parent`, and divide the parent's tokens at `plane`."""
        self.active_E[new] = True
        self.weight[new] = self.weight[parent]
        if self.bias is not None:
            self.bias[new] = self.bias[parent]
        self.normal_ED[new], self.offset_E[new] = plane.normal_D.to(self.normal_ED), plane.offset
        self.side_EE[:, new] = self.side_EE[:, parent]
        self.side_EE[new, new], self.side_EE[new, parent] = 1, -1
        self.split_from_E[new] = parent
        self.refresh()

    @torch.no_grad()
    def deactivate(self, expert: int) -> None:
        """Deactivate logical expert `expert`.

        Its tokens go to the last active expert that was split from it, else to its parent if active, else to the next
        best expert of each token.
        """
        children = self.children_of(expert)
        if children:
            heir = children[-1]
            self.split_from_E[children] = heir
            self.split_from_E[heir] = self.split_from_E[expert]
            self.normal_ED[heir], self.offset_E[heir] = self.normal_ED[expert], self.offset_E[expert]
            self.side_EE[heir] = self.side_EE[expert]
        self.side_EE[expert], self.normal_ED[expert], self.offset_E[expert] = 0, 0, 0
        self.side_EE[:, expert] = 0
        self.split_from_E[expert] = NO_EXPERT
        self.active_E[expert] = False
        self.weight[expert] = 0
        self.refresh()

    def children_of(self, expert: int) -> list[int]:
        """Return the active logical experts that were split from `expert`, earliest first."""
        children = (self.split_from_E == expert).nonzero().flatten().tolist()
        # A later child is also below the hyperplanes of the earlier ones.
        return sorted(children, key=lambda child: int((self.side_EE[children, child] == -1).sum()))
